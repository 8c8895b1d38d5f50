"""The order of samples and their random numbers: pure functions, compared with their
definitions.
"""

import numpy as np
import pytest

from trainer.data import sampling
from trainer.recipe import load
from trainer.recipe.checks import count_largest_rows
from trainer.recipe.shares import count_rows


def test_permutations_hold_every_sample_once_and_differ_between_epochs_and_seeds_and_repeat():
    for samples in (1, 2, 17, 1000):
        assert sorted(sampling.draw_permutation(3, 0, samples).tolist()) == list(range(samples))
    drawn = {
        tuple(sampling.draw_permutation(seed, epoch, 50).tolist())
        for seed in (0, 1, 2**62)
        for epoch in (0, 1, 2)
    }
    assert len(drawn) == 9
    assert (
        sampling.draw_permutation(0, 1, 50).tolist() == sampling.draw_permutation(0, 1, 50).tolist()
    )


def test_draws_are_uniform_and_independent():
    a, b = (
        sampling.draw_uniform(0, 0, np.arange(20_000), draw)
        for draw in (sampling.FLIP, sampling.SHIFT_X)
    )
    assert a.min() >= 0 and a.max() < 1
    assert np.histogram(a, 10)[0] == pytest.approx(2000, rel=0.1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.03


def shared_out(recipe, rows):
    """Return what each data share reads of three global batches of 16, with `rows` as local
    batches, and the order that they divide.
    """
    permuted = sampling.draw_permutation(0, 0, 3 * 16 + 3)
    spans = [sampling.share_spans(recipe.batch_size, rows, index) for index in range(len(rows))]
    return permuted, [sampling.share_rows(permuted, recipe.batch_size, span) for span in spans]


def check_shared_out(permuted, parts, pieces, size=16):
    for step in range(3):
        assert all(len(part) == 3 and len(part[step]) == pieces for part in parts)
        rows = [
            np.concatenate([part[step][piece] for part in parts]).tolist()
            for piece in range(pieces)
        ]
        assert np.concatenate(rows).tolist() == permuted[step * size : (step + 1) * size].tolist()
        assert {*map(len, rows)} == {size // pieces}, (
            "the same micro-batches for any number of shards"
        )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("together", [1, 2])
def test_shards_share_out_each_global_batch_in_order(count, pieces, together):
    recipe = load(None, "batch_size=16", f"accumulate={pieces}", f"augment.mixup={together - 1}")
    permuted, parts = shared_out(recipe, count_rows(recipe, count))
    sizes = [len(rows) for part in parts for step in part for rows in step]
    assert min(sizes) >= together
    assert max(sizes) - min(sizes) <= together
    assert not any(n % together for n in sizes)
    assert max(sizes) == count_largest_rows(recipe, count)
    check_shared_out(permuted, parts, pieces)


@pytest.mark.parametrize(
    ("numbers", "words", "rows"),
    [
        ([3, 1], "", [12, 4]),
        ([0.1, 0.3], "accumulate=2", [2, 6]),
        ([5, 3, 1], "", [9, 5, 2]),
        ([5, 3, 1], "augment.mixup=0.2", [8, 6, 2]),
        ([2, 1], "accumulate=4 augment.mixup=0.2", [2, 2]),
    ],
)
def test_shares_by_numbers_divide_each_micro_batch_in_proportion(numbers, words, rows):
    recipe = load(None, "batch_size=16", f"shares={numbers}", *words.split())
    assert count_rows(recipe, len(numbers)) == rows
    assert count_largest_rows(recipe, len(numbers)) == max(rows)
    permuted, parts = shared_out(recipe, rows)
    assert [[len(piece) for step in part for piece in step] for part in parts] == [
        [each] * 3 * recipe.accumulate for each in rows
    ]
    check_shared_out(permuted, parts, recipe.accumulate)


def read_by_shares(samples, spans, steps, pieces):
    """Return the micro-batches of each share, which together use each sample once, in order."""
    order = sampling.draw_permutation(1, 2, samples)
    shares = [
        sampling.divide_rows(
            order[start:stop],
            steps,
            pieces,
        )
        for start, stop in spans
    ]
    assert {len(share) for share in shares} == {steps}
    read = [[piece for step in share for piece in step] for share in shares]
    assert np.concatenate([piece for share in read for piece in share]).tolist() == order.tolist()
    return read


@pytest.mark.parametrize(("rows", "samples"), [([3, 1], 65), ([9, 5, 2], 1009), ([1, 1, 14], 48)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_contiguous_parts_in_proportion_use_each_sample_once(rows, samples, pieces):
    spans = [sampling.compute_span(samples, index, len(rows), rows) for index in range(len(rows))]
    read = read_by_shares(
        samples,
        spans,
        -(-samples // (pieces * sum(rows))),
        pieces,
    )
    for (start, stop), share, most in zip(spans, read, rows, strict=True):
        assert abs((stop - start) - samples * most / sum(rows)) < 1
        assert max(map(len, share)) <= most


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(10_003, [2500, 2500, 2500, 2503]), (8, [4, 4]), (7, [7]), (5, [1, 1, 3]), (2, [0, 0, 2])],
)
def test_own_parts_have_equal_sizes_and_the_last_takes_the_rest(samples, sizes):
    spans = [sampling.compute_span(samples, index, len(sizes)) for index in range(len(sizes))]
    assert [stop - start for start, stop in spans] == sizes
    assert [index for span in spans for index in range(*span)] == list(range(samples))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_contiguous_rows_use_each_sample_once_in_batches_of_nearly_one_size(count, pieces, rows):
    batch_size = count * pieces * rows
    for samples in (batch_size, batch_size + 1, 2 * batch_size - 1, 97, 1000, 1009):
        spans = [sampling.compute_span(samples, index, count) for index in range(count)]
        steps = -(-max(stop - start for start, stop in spans) // (batch_size // count))
        for share in read_by_shares(samples, spans, steps, pieces):
            sizes = [*map(len, share)]
            assert len(sizes) == steps * pieces
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= rows


@pytest.mark.parametrize("rows", [[4], [4, 4], [4, 4, 4], [5, 1], [1, 2, 4]])
@pytest.mark.parametrize("samples", range(1, 18))
def test_evaluation_takes_each_sample_once(samples, rows):
    shards = [sampling.list_evaluation_spans(samples, rows, index) for index in range(len(rows))]
    assert {len(spans) for spans in shards} == {-(-samples // sum(rows))}
    for spans, most in zip(shards, rows, strict=True):
        assert all(0 <= stop - start <= most for start, stop in spans)
    accepted = [
        sample for spans in shards for start, stop in spans for sample in range(start, stop)
    ]
    assert sorted(accepted) == list(range(samples))


def test_crop_boxes_keep_to_the_image_and_the_law():
    boxes = sampling.crop_boxes(
        sampling.draw_boxes(0, 0, np.arange(5000), sampling.CROP),
        300,
        400,
        (0.08, 1.0),
    )
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 300).all()
    assert (left + width <= 400).all()
    share = height * width / 120_000
    ratio = width / height
    assert share.min() > 0.07 and share.max() <= 1
    assert ratio.min() > 0.73 and ratio.max() < 1.36
    assert 0.4 < share.mean() < 0.6


def test_crop_boxes_one_by_one_are_those_of_many():
    sizes = [
        (300, 400),
        (1, 1),
        (2, 3),
        (10, 1000),
        (1000, 10),
        (4000, 3000),
        (224, 224),
        (7, 9),
        (375, 500),
        (31, 33),
    ]
    draws = sampling.draw_boxes(5, 3, np.arange(600), sampling.CROP)
    for scale in [(0.08, 1.0), (0.9, 1.0)]:
        alone = sampling.CropBoxes(draws, scale)
        for height, width in sizes:
            together = sampling.crop_boxes(draws, height, width, scale)
            assert [list(alone.box(row, height, width)) for row in range(600)] == together.tolist()


def test_erasing_happens_as_often_as_asked_and_inside():
    boxes = sampling.draw_erase_boxes(0, 0, np.arange(4000), 0.25, 32)
    erased = boxes[boxes[:, 2] > 0]
    assert 0.22 < len(erased) / 4000 < 0.28
    assert ((erased[:, :2] + erased[:, 2:]) <= 32).all()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_labels_agree_with_the_mixed_images(mixup, cutmix):
    mix = sampling.draw_mix(0, 1, 2, 1000, mixup, cutmix, 32)
    area = mix.box[:, 2] * mix.box[:, 3] / 32**2
    assert mix.label == pytest.approx(mix.blend - area, abs=1e-6)
    assert mix.label.min() >= 0 and mix.label.max() <= 1
    assert ((mix.box[:, :2] + mix.box[:, 2:]) <= 32).all()
    cut = (area > 0).mean()
    blended = (mix.blend < 1).mean()
    assert (cut > 0.3) == bool(cutmix) and (blended > 0.3) == bool(mixup)
    assert (mix.blend[area > 0] == 1).all()


def test_mixing_follows_the_step_and_splits_by_rows():
    first, again, other = (sampling.draw_mix(0, 0, step, 8, 0.2, 0.0, 8) for step in (5, 5, 6))
    assert first.blend.tolist() == again.blend.tolist() != other.blend.tolist()
    assert first.rows(4, 8).blend.tolist() == first.blend[2:4].tolist()


@pytest.mark.parametrize("counts", [(90, 9, 1), (5, 5), (7, 2, 2, 1), (1, 30)])
def test_a_balanced_order_has_every_class_as_often(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    samples = len(labels)
    seen = np.zeros((len(counts),), int)
    for epoch in range(6):
        order = sampling.draw_balanced_permutation(3, epoch, labels, samples)
        drawn = np.bincount(labels[order % samples], minlength=len(counts))
        assert len(order) == samples == len(set(order.tolist()))
        assert np.ptp(drawn) <= 1
        assert np.array_equal(order, sampling.draw_balanced_permutation(3, epoch, labels, samples))
        seen += drawn
    assert np.ptp(seen) <= 2  # the class that comes once less is another one each time


def test_a_balanced_order_goes_through_a_class_before_any_comes_again():
    labels = np.repeat([0, 1], [40, 8])
    epochs = [sampling.draw_balanced_permutation(0, epoch, labels, 48) % 48 for epoch in range(5)]
    frequent = np.concatenate([order[labels[order] == 0] for order in epochs])
    # 24 an epoch: twice or 3 times.
    assert np.bincount(frequent, minlength=48)[:40].tolist().count(3) == 120 - 2 * 40
    assert np.bincount(epochs[0], minlength=48)[40:].tolist() == [3] * 8
    assert not np.array_equal(epochs[0], epochs[1])

"""Batches: the same for any number of shards and workers, resumable, exactly counted; and what bad
images do.
"""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver

import numpy as np
import pytest
import torch

from tests import warm
from tests.command_line import alive, environment, latest
from tests.data.loading import (
    AUGMENT,
    Items,
    becomes_true,
    epoch,
    photo_sets,
    same,
    sets_of,
)
from tests.data.photo_folders import cut, photo_set
from trainer.data import (
    DataShare,
    ImageSet,
    count_steps_per_epoch,
    loaders,
    open_datasets,
    sampling,
)
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.pool import DevicePool
from trainer.processes import fork_server
from trainer.recipe import load


def memory_sets(train=24, val=7, size=8):
    pixels = np.random.default_rng(0).integers(
        0,
        256,
        (train + val, 3, size, size),
        dtype=np.uint8,
    )
    images = torch.from_numpy(pixels)
    labels = torch.arange(train + val)
    return sets_of(
        ImageSet(images[:train], labels[:train]),
        ImageSet(images[train:], labels[:val]),
        train + val,
        size,
    )


def labels_of(loader):
    """Return targets and counts of batches: of an epoch without its first step, and of the
    evaluation.
    """
    held_out = [
        (batch.targets[: batch.count].clone(), batch.count) for batch in loader.evaluation()
    ]
    return [(batch.targets.clone(), batch.count) for batch in loader.training(1, 1)], held_out


def by_shards(loading, sets, count, *words, **more):
    """An epoch as several shards read it, a list of batches each."""
    return [
        epoch(loading(sets, *words, shard=DataShare(index, count, **more)), 1)
        for index in range(count)
    ]


def sharded(loading, sets, shards, pieces, *words):
    """The same, put together to global batches."""
    parts = by_shards(loading, sets, shards, f"accumulate={pieces}", *words)
    steps = len(parts[0]) // pieces
    rows = [
        [part[step * pieces + piece] for piece in range(pieces) for part in parts]
        for step in range(steps)
    ]
    return [(torch.cat([x for x, _ in row]), torch.cat([t for _, t in row])) for row in rows]


@pytest.mark.slow(cases=["false-resized-photo_sets"])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
@pytest.mark.parametrize("crop", ["pad", "resized"])
@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_batches_are_the_same_for_any_number_of_shards(loading, sets, crop, channels_last):
    words = (*AUGMENT, f"augment.crop={crop}", f"channels_last={channels_last}")
    whole = sharded(loading, sets(), 1, 1, *words)
    assert len(whole) == 3
    assert whole[0][1].shape == (8, 24 + 7 * (sets is memory_sets))
    for shards, pieces in (
        (2, 1),
        (4, 1),
        (1, 2),
        (2, 2),
    ):
        assert same(sharded(loading, sets(), shards, pieces, *words), whole)


@pytest.mark.parametrize("words", [(), ("data.workers=2",)])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_an_epoch_can_be_entered_in_the_middle(loading, sets, words):
    whole = epoch(loading(sets(), *AUGMENT, *words, "accumulate=2"), 3)
    assert len(whole) == 6
    assert same(
        epoch(
            loading(sets(), *AUGMENT, *words, "accumulate=2"),
            3,
            start=1,
        ),
        whole[2:],
    )
    assert epoch(loading(sets(), *words), 3, start=3) == []


@pytest.mark.slow(cases=["3-memory_sets", "3-photo_sets", "2-photo_sets"])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_evaluation_counts_each_sample_once(loading, sets, shards):
    for samples in range(1, 18):
        seen = []
        batches = set()
        for index in range(shards):
            loader = loading(
                sets(val=samples), f"batch_size={4 * shards}", shard=DataShare(index, shards)
            )
            actual = list(loader.evaluation())
            batches.add(len(actual))
            assert all(len(batch.inputs) == len(batch.targets) == 4 for batch in actual)
            seen += [label for batch in actual for label in batch.targets[: batch.count].tolist()]
        assert sorted(seen) == list(range(samples)) and len(batches) == 1


def test_the_last_partial_batch_is_dropped_and_too_few_images_refused(loading):
    loader = loading(memory_sets(train=23))
    assert loader.steps_per_epoch == 2 and len(epoch(loader)) == 2
    for every_sample in (False, True):
        with pytest.raises(RecipeError, match=r"\b7 training images .*\bbatch_size=6\b"):
            count_steps_per_epoch(
                7,
                load(None, "batch_size=8", "augment.mixup=1.0"),
                DataShare(every_sample=every_sample),
            )
        with pytest.raises(RecipeError, match=r"\b7 training images .*\b8\b"):
            count_steps_per_epoch(
                7,
                load(None, "batch_size=16", "accumulate=2"),
                DataShare(0, 4, every_sample=every_sample),
            )


class Drawers:
    """Photos that have labels, but raise an error when read."""

    def __init__(self, count):
        self.labels = np.arange(count)

    def __len__(self):
        return len(self.labels)

    def where(self, index):
        return f"drawer {index}"

    def read(self, index, channels):
        raise ValueError("must not be read")


def drawer_sets(train=24, val=7):
    return replace(photo_sets(train, val), train=Drawers(train), val=Drawers(val))


def without_images(loading, sets, *words, **shard):
    """Return a loader that needs no images, its targets, and those of its evaluation with their
    counts.
    """
    loader = loading(sets, *words, shard=DataShare(inputs=False, **shard))
    batches = list(loader.training(1, 1))
    held_out = list(loader.evaluation())
    assert all(batch.inputs.numel() == 0 for batch in [*batches, *held_out])
    return (
        loader,
        [(x.targets.clone(), x.count) for x in batches],
        [(x.targets[: x.count], x.count) for x in held_out],
    )


@pytest.mark.parametrize("words", [(), ("accumulate=2", *AUGMENT)])
@pytest.mark.parametrize(
    ("index", "count", "every_sample"), [(0, 1, False), (1, 2, False), (1, 2, True)]
)
@pytest.mark.parametrize(
    ("sets", "source"), [(memory_sets, memory_sets), (photo_sets, drawer_sets)]
)
def test_labels_alone_are_those_of_the_whole_batches(
    loading, sets, source, words, index, count, every_sample
):
    loader = loading(sets(), *words, shard=DataShare(index, count, every_sample=every_sample))
    targets, held_out = labels_of(loader)
    parts = {"index": index, "count": count, "every_sample": every_sample}
    _, labels, others = without_images(loading, source(), *words, "data.workers=2", **parts)
    assert multiprocessing.active_children() == []
    assert targets and same(labels, targets) and same(others, held_out)


@pytest.mark.parametrize("words", [(), ("data.on_error=skip",)])
def test_labels_that_are_not_at_hand_are_read_with_their_images(loading, words):
    broken = (3, 4, 16) if words else ()
    loader = loading(photo_sets(broken=broken), *AUGMENT, *words)
    targets, held_out = labels_of(loader)
    other, labels, others = without_images(loading, photo_sets(broken=broken), *AUGMENT, *words)
    assert same(labels, targets) and same(others, held_out)
    # The rank with the images counts them.
    assert other.skipped == 0 and bool(loader.skipped) == bool(broken)


@pytest.mark.parametrize("every_sample", [False, True])
@pytest.mark.parametrize("words", [(), ("data.on_error=skip", "accumulate=2", *AUGMENT)])
@pytest.mark.parametrize("sets", [memory_sets, drawer_sets])
def test_a_shard_in_the_middle_reads_nothing(loading, sets, words, every_sample):
    parts = {"index": 1, "count": 2, "every_sample": every_sample}
    loader, batches, held_out = without_images(
        loading, sets(), "data.workers=2", *words, targets=False, **parts
    )
    assert multiprocessing.active_children() == [] and loader.skipped == 0
    assert len(batches) == (loader.steps_per_epoch - 1) * (2 if words else 1)
    assert {count for _, count in batches} == {2 if words else 4}
    assert [count for _, count in held_out] == ([2, 1] if words else [3])
    assert all(targets.numel() == 0 for targets, _ in [*batches, *held_out])


@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_images_alone_are_those_of_the_whole_batches(loading, sets):
    whole = epoch(loading(sets(), *AUGMENT))
    loader = loading(sets(), *AUGMENT, shard=DataShare(targets=False))
    images = epoch(loader)
    assert all(targets.numel() == 0 for _, targets in images)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, images, strict=True))
    assert all(
        batch.targets.numel() == 0 and batch.inputs.numel() > 0 for batch in loader.evaluation()
    )


@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_a_data_share_that_reads_for_a_teacher_reads_no_validation_images(loading, sets):
    """Reading a photo raises an error here.

    The labels are those of another data share's outputs.
    """
    whole = epoch(loading(sets(), *AUGMENT))
    held_out = sets().val if sets is memory_sets else Drawers(7)
    loader = loading(
        replace(sets(), val=held_out),
        *AUGMENT,
        shard=DataShare(counted=False),
    )
    assert same(epoch(loader), whole)
    (batch,) = loader.evaluation()
    assert batch.inputs.numel() == 0
    assert batch.targets[: batch.count].tolist() == [*range(7)]


@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
@pytest.mark.parametrize(
    ("samples", "count", "pieces", "batches"), [(27, 2, 2, 8), (27, 2, 1, 4), (23, 1, 1, 3)]
)
def test_every_sample_is_used_once_and_augmented_as_ever(
    loading, sets, samples, count, pieces, batches
):
    words = ("augment.crop=pad", "augment.hflip=0.5", "augment.erase=0.5", "augment.auto=trivial")
    (plain,) = by_shards(
        loading,
        sets(samples),
        1,
        "batch_size=1",
        *words,
        every_sample=True,
    )
    expected = {int(label): image for image, label in plain}
    actual = by_shards(
        loading, sets(samples), count, f"accumulate={pieces}", *words, every_sample=True
    )
    assert {len(shard) for shard in actual} == {batches}
    for shard in actual:
        sizes = [len(labels) for _, labels in shard]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 8 // count // pieces
        for images, labels in shard:
            assert len(images) == len(labels)
            assert torch.equal(images, torch.cat([expected[label] for label in labels.tolist()]))
    seen = [label for shard in actual for _, labels in shard for label in labels.tolist()]
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("channels_last", ["true", "false"])
@pytest.mark.parametrize("alpha", ["augment.mixup=1.0", "augment.cutmix=1.0"])
def test_ragged_batches_mix_neighbours_and_leave_an_odd_last_one(loading, alpha, channels_last):
    words = (f"channels_last={channels_last}",)
    plain = by_shards(loading, memory_sets(27), 2, *words, every_sample=True)
    mixed = by_shards(loading, memory_sets(27), 2, alpha, *words, every_sample=True)
    odd = 0
    shares = []
    for a, b in zip(plain, mixed, strict=True):
        for (images, labels), (inputs, targets) in zip(a, b, strict=True):
            assert (
                inputs.is_contiguous(memory_format=torch.channels_last) or channels_last == "false"
            )
            paired = len(labels) // 2 * 2
            odd += len(labels) - paired
            assert torch.equal(inputs[paired:], images[paired:])
            assert torch.equal(targets[paired:].argmax(1), labels[paired:])
            assert (targets[paired:].amax(1) == 1).all()
            for k in range(0, paired, 2):
                pair, (first, second) = targets[k : k + 2], labels[k : k + 2].tolist()
                assert pair[0, first] == pair[1, second]
                assert pair[0, second] == pair[1, first]
                assert pair.sum(1).tolist() == pytest.approx([1, 1])
                assert not torch.equal(inputs[k], images[k]) or pair[0, first] > 0.9
                shares.append(float(pair[0, first]))
    assert odd == 5 and len(set(shares)) > len(shares) / 2  # the shards draw apart


@pytest.mark.parametrize(
    ("samples", "batch_size", "count", "pieces", "steps"),
    [(10_003, 64, 4, 4, 157), (1437, 64, 2, 1, 23), (64, 64, 4, 16, 1), (65, 64, 4, 1, 2)],
)
def test_steps_of_an_epoch_with_every_sample(loading, samples, batch_size, count, pieces, steps):
    recipe = load(None, f"batch_size={batch_size}", f"accumulate={pieces}")
    shards = [DataShare(index, count, every_sample=True) for index in range(count)]
    assert {count_steps_per_epoch(samples, recipe, shard) for shard in shards} == {steps}
    assert count_steps_per_epoch(samples, recipe, DataShare(0, count)) == samples // batch_size
    loader = loading(
        memory_sets(samples, size=2),
        f"batch_size={batch_size}",
        f"accumulate={pieces}",
        shard=shards[0],
    )
    assert loader.steps_per_epoch == steps and loader.samples_per_step == samples / steps


@pytest.mark.parametrize(
    ("samples", "batch_size", "count", "pieces", "settings", "fewer"),
    [
        (10_003, 4, 4, 1, ["batch_size=8"], False),
        (65, 64, 4, 16, ["accumulate=1"], True),
        (15, 8, 8, 1, [], True),
    ],
)
def test_shards_too_small_for_their_micro_batches_are_refused_with_what_works(
    samples, batch_size, count, pieces, settings, fewer
):
    shard = DataShare(0, count, every_sample=True)
    words = [f"batch_size={batch_size}", f"accumulate={pieces}"]
    numbers = rf"^{samples} .*\b{count} processes\b.*{' '.join(words)};"
    with pytest.raises(RecipeError, match=numbers) as error:
        count_steps_per_epoch(samples, load(None, *words), shard)
    remedy = str(error.value).partition(";")[2]
    assert re.findall(r"\w+=\d+", remedy) == settings
    assert ("fewer processes" in remedy) == fewer
    if settings:
        recipe = load(None, *latest(*words, *settings))
        count_steps_per_epoch(samples, recipe, shard)
        spans = [range(*sampling.compute_span(samples, i, count)) for i in range(count)]
        steps = -(-max(map(len, spans)) // (recipe.batch_size // count))
        parts = [sampling.divide_rows(np.array(span), steps, recipe.accumulate) for span in spans]
        assert min(len(piece) for part in parts for step in part for piece in step) > 0


@pytest.mark.parametrize("words", [(), ("data.workers=1",)])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_global_random_states_are_untouched(loading, sets, words):
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loader = loading(sets(), *AUGMENT, *words)
    epoch(loader)
    list(loader.evaluation())
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


DAMAGES = [
    cut,
    lambda path: path.write_text("no image"),
    lambda path: path.write_bytes(b""),
    os.remove,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_image_stops_or_is_skipped(loading, tmp_path, damage):
    root = photo_set(tmp_path, {"a": 3, "b": 3}, split=True)
    words = ("data.name=imagefolder", f"data.root={root}", "data.image_size=72", "batch_size=6")
    sets = open_datasets(load(None, *words))
    for split in ("train", "val"):
        damage(root / split / "a" / "2.jpg")
    with pytest.raises(SetupError, match=r"train/a/2\.jpg .*\(.+\).* data\.on_error=skip"):
        epoch(loading(sets, *words))
    with pytest.raises(SetupError, match=r"val/a/2\.jpg "):
        list(loading(sets, *words).evaluation())
    loader = loading(sets, *words, "data.on_error=skip")
    assert len(epoch(loader)) == 1 and loader.skipped == 1
    (batch,) = loader.evaluation()
    assert batch.count == 5 and loader.skipped == 2


def test_a_replacement_is_the_next_readable_sample(loading):
    loader = loading(photo_sets(broken=(3, 4)), "data.on_error=skip")
    labels = sorted(label for _, targets in epoch(loader) for label in targets.tolist())
    assert labels == sorted([*(set(range(24)) - {3, 4}), 5, 5])


def test_no_readable_photo_is_an_error_even_when_skipping(loading):
    with pytest.raises(SetupError, match="damaged sample"):
        epoch(loading(photo_sets(broken=range(24)), "data.on_error=skip"))


@pytest.mark.parametrize("victim", ["workers", "fork server"])
def test_a_worker_that_dies_is_named_in_bounded_time(loading, victim):
    """Killing a fork server ends its workers."""
    loader = loading(photo_sets(train=64, hang=40), "data.workers=2")
    batches = loader.training(0)
    next(batches)
    workers = [child.pid for child in multiprocessing.active_children()]
    for pid in workers if victim == "workers" else [forkserver._forkserver._forkserver_pid]:
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"worker \d+.* died .*mine: item \d+") as error:
        list(batches)
    assert time.monotonic() - start < 10
    assert any(str(pid) in str(error.value) for pid in workers)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_in_bounded_time(loading):
    # So many samples that the worker cannot have read them all before it is stopped.
    loader = loading(photo_sets(train=800), "data.workers=1")
    batches = loader.training(0)
    start = time.monotonic()
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    # The limit applies from now on, because a start may take longer on a busy machine.
    loader._feeds[0]._readers._timeout = 2.0
    with pytest.raises(PeerError, match=r"worker \d+ .*timeout=2 .*\b8 samples"):
        list(batches)
    assert time.monotonic() - start < 40


def in_group(pid, group):
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == group


@pytest.mark.slow
def test_workers_go_when_their_rank_is_killed_and_not_before(tmp_path):
    """The fork server was started by a thread that is not the main thread, so the kernel does not
    tell it when the rank ends.
    """
    script = textwrap.dedent("""
        import multiprocessing, sys, threading, time
        from tests import warm
        from tests.data import loading
        from trainer.data import DataShare, Loader
        from trainer.recipe import load
        warm.start_none_warm()  # what is forked warm has the main thread for a parent
        def begin():
            next(batches)
        if __name__ == "__main__":
            recipe = load(None, "batch_size=8", "data.workers=2")
            sets = loading.photo_sets()
            batches = Loader(sets, recipe, None, DataShare(), loading.CPU).training(0)
            first = threading.Thread(target=begin)
            first.start()
            first.join()
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            sys.stdin.readline()
            print(sum(1 for _ in batches), flush=True)
            time.sleep(1000)
    """)
    (tmp_path / "rank.py").write_text(script)
    rank = warm.Popen(
        [sys.executable, str(tmp_path / "rank.py")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2
        members = [
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and in_group(int(pid), rank.pid)
        ]
        for pid in members:
            # torchrun's SIGTERM reaches the whole group; the rank has a handler.
            if pid != rank.pid:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "2\n"
        rank.kill()
        rank.wait(10)
        assert becomes_true(lambda: not any(map(alive, members)), 5)
    finally:
        for stream in (rank.stdin, rank.stdout):
            stream.close()
        rank.kill()
        rank.wait(10)


def test_a_worker_outlives_sigterm_from_its_first_moment():
    forkserver._forkserver._stop()  # another test's may be running, which does not know of this
    with DevicePool(["cpu"], abs) as pool:  # The pool uses the same fork server.
        assert list(pool.map([-1])) == [1]
        worker = fork_server.start_server("trainer.data.photos.photo_reader").Process(
            target=_signalled_as_it_starts
        )
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0


def _signalled_as_it_starts():
    for number in fork_server.SIGNALS:
        os.kill(os.getpid(), number)
    fork_server.begin_worker()
    for number in fork_server.SIGNALS:
        os.kill(os.getpid(), number)


def test_only_shards_that_read_photos_ask_for_shared_memory(loading, monkeypatch):
    asked = []
    monkeypatch.setattr(loaders, "check_shared_memory", asked.append)
    for shard in (DataShare(inputs=False), DataShare(inputs=False, targets=False)):
        loading(drawer_sets(), "data.workers=2", shard=shard)
        loading(memory_sets(), "data.workers=2", shard=shard)
    assert asked == []
    loading(drawer_sets(), "data.workers=2", shard=DataShare(targets=False))
    assert asked == [5 * 8 * (16 * 16 * 3 + 8 + 8)]  # slots, rows, bytes of pixels, label and index


def test_a_set_that_cannot_travel_is_explained(loading):
    sets = photo_sets()
    sets.train.items.poison = threading.Lock()
    with pytest.raises(RecipeError, match=r"data\.workers=0"):
        epoch(loading(sets, "data.workers=1"))


def test_functions_and_classes_that_no_module_holds_travel_to_workers(loading):
    class Here(Items):
        pass

    plain = photo_sets()
    inside = photo_sets()
    inside.train.items = Here(24)
    inside.train.items.transform = lambda image: image
    assert same(epoch(loading(inside, "data.workers=1")), epoch(loading(plain)))

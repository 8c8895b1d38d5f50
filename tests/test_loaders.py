"""Batches: the same for any number of shards and workers, resumable, exactly counted; and what bad images do."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.data import Datasets, ImageSet, Loader, Shard, full_batches, open_datasets, workers
from trainer.data.datasets import UserItems
from trainer.data.images import read_image
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.recipe import load

CPU = torch.device("cpu")
AUGMENT = (
    "augment.crop=pad",
    "augment.hflip=0.5",
    "augment.auto=trivial",
    "augment.erase=0.5",
    "augment.mixup=0.2",
    "augment.cutmix=1.0",
)


class Items:
    """Photos whose pixels tell their index; some break, hang, or end the worker."""

    def __init__(self, count, broken=(), hang=None):
        self.count, self.broken, self.hang = count, broken, hang

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.broken:
            raise ValueError("broken on purpose")
        if index == self.hang:
            time.sleep(1000)
        pixels = np.random.default_rng(index).integers(0, 256, (3, 20, 30), dtype=np.uint8)
        return torch.from_numpy(pixels), index


def memory_sets(train=24, val=7, size=8):
    pixels = np.random.default_rng(0).integers(0, 256, (train + val, 3, size, size), dtype=np.uint8)
    images, labels = torch.from_numpy(pixels), torch.arange(train + val)
    return Datasets(
        "mine",
        ImageSet(images[:train], labels[:train]),
        ImageSet(images[train:], labels[:val]),
        tuple(map(str, range(train + val))),
        3,
        size,
        (0.5,) * 3,
        (0.25,) * 3,
        False,
        "val",
    )


def photo_sets(train=24, val=7, size=16, **faults):
    sources = [UserItems(Items(count, **faults), "mine", 1000) for count in (train, val)]
    classes = tuple(map(str, range(max(train, val))))
    return Datasets("mine", *sources, classes, 3, size, (0.5,) * 3, (0.25,) * 3, False, "val")


class Loading:
    """Loaders that are closed in the end."""

    def __init__(self):
        self.made = []

    def __call__(self, sets, *words, shard=None):
        recipe = load(None, "batch_size=8", "data.workers=0", "timeout=30", *_last(words))
        self.made.append(Loader(sets, recipe, shard or Shard(), CPU))
        return self.made[-1]


def _last(words):
    return {word.partition("=")[0]: word for word in words}.values()


@pytest.fixture
def loading(monkeypatch):
    made = Loading()
    plain = load
    monkeypatch.setitem(globals(), "load", lambda recipe, *words: plain(recipe, *_last(words)))
    yield made
    for loader in made.made:
        loader.close()
    assert multiprocessing.active_children() == []


def epoch(loader, number=0, start=0):
    """Inputs and targets of an epoch's micro-batches, copied."""
    return [(batch.inputs.clone(), batch.targets.clone()) for batch in loader.training(number, start)]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) and torch.equal(s, t) for (x, s), (y, t) in zip(a, b, strict=True)
    )


def sharded(loading, sets, shards, pieces, *words):
    """An epoch read by several shards, put together to global batches."""
    parts = []
    for index in range(shards):
        loader = loading(sets, f"accumulate={pieces}", *words, shard=Shard(index, shards))
        parts.append(epoch(loader, 1))
    steps = len(parts[0]) // pieces
    rows = [[part[step * pieces + piece] for part in parts for piece in range(pieces)] for step in range(steps)]
    return [(torch.cat([x for x, _ in row]), torch.cat([t for _, t in row])) for row in rows]


@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
@pytest.mark.parametrize("crop", ["pad", "resized"])
@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_batches_are_the_same_for_any_number_of_shards(loading, sets, crop, channels_last):
    words = (*AUGMENT, f"augment.crop={crop}", f"channels_last={channels_last}")
    whole = sharded(loading, sets(), 1, 1, *words)
    assert len(whole) == 3 and whole[0][1].shape == (8, 24 + 7 * (sets is memory_sets))
    for shards, pieces in ((2, 1), (4, 1), (1, 2), (2, 2)):
        assert same(sharded(loading, sets(), shards, pieces, *words), whole)


def test_augmentation_changes_with_the_epoch_and_the_images(loading):
    plain = epoch(loading(memory_sets()))
    first, second = (epoch(loading(memory_sets(), *AUGMENT), number) for number in (0, 1))
    assert not same(plain, first) and not same(first, second)
    assert first[0][1].is_floating_point() and torch.allclose(first[0][1].sum(1), torch.ones(8))


def test_workers_change_nothing_and_persist(loading):
    inline, forked = loading(photo_sets(), *AUGMENT), loading(photo_sets(), *AUGMENT, "data.workers=2")
    for number in (0, 1):
        assert same(epoch(forked, number), epoch(inline, number))
        if number == 0:
            before = {child.pid for child in multiprocessing.active_children()}
    assert len(before) == 2 and {child.pid for child in multiprocessing.active_children()} == before
    a, b = ([(x.inputs.clone(), x.targets, x.count) for x in loader.evaluation()] for loader in (inline, forked))
    assert [count for *_, count in a] == [count for *_, count in b] == [7]
    assert torch.equal(a[0][0][:7], b[0][0][:7]) and torch.equal(a[0][1], b[0][1])


@pytest.mark.parametrize("words", [(), ("data.workers=2",)])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_an_epoch_can_be_entered_in_the_middle(loading, sets, words):
    whole = epoch(loading(sets(), *AUGMENT, *words, "accumulate=2"), 3)
    assert len(whole) == 6
    assert same(epoch(loading(sets(), *AUGMENT, *words, "accumulate=2"), 3, start=1), whole[2:])
    assert epoch(loading(sets(), *words), 3, start=3) == []


def test_an_epoch_can_be_left_in_the_middle(loading):
    loader, inline = loading(photo_sets(), "data.workers=2"), loading(photo_sets())
    next(loader.training(0))
    kept = loader.training(0)
    next(kept)
    assert same(epoch(loader, 1), epoch(inline, 1))


@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_evaluation_counts_each_sample_once(loading, sets, shards):
    for samples in range(1, 18):
        seen, batches = [], set()
        for index in range(shards):
            loader = loading(sets(val=samples), f"batch_size={4 * shards}", shard=Shard(index, shards))
            found = list(loader.evaluation())
            batches.add(len(found))
            assert all(len(batch.inputs) == len(batch.targets) == 4 for batch in found)
            seen += [label for batch in found for label in batch.targets[: batch.count].tolist()]
        assert sorted(seen) == list(range(samples)) and len(batches) == 1


def test_the_last_partial_batch_is_dropped_and_too_few_images_refused(loading):
    loader = loading(memory_sets(train=23))
    assert loader.steps_per_epoch == 2 and len(epoch(loader)) == 2
    with pytest.raises(RecipeError, match=r"7 training images are fewer .* try batch_size=6"):
        full_batches(7, load(None, "batch_size=8", "augment.mixup=1.0"), 1)
    with pytest.raises(RecipeError, match="at least 8 are needed"):
        full_batches(7, load(None, "batch_size=16", "accumulate=2"), 4)


def test_labels_alone_cost_no_images(loading):
    whole = epoch(loading(memory_sets(), *AUGMENT))
    labels = epoch(loading(memory_sets(), *AUGMENT, shard=Shard(inputs=False)))
    assert all(inputs.numel() == 0 for inputs, _ in labels)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, labels, strict=True))


@pytest.mark.parametrize("words", [(), ("data.workers=1",)])
@pytest.mark.parametrize("sets", [memory_sets, photo_sets])
def test_global_random_states_are_untouched(loading, sets, words):
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loader = loading(sets(), *AUGMENT, *words)
    epoch(loader)
    list(loader.evaluation())
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]


def photo_folder(root, count=6):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 80, 100, 3), dtype=np.uint8)
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
        for index in range(count):
            Image.fromarray(pixels[index]).save(root / split / "a" / f"{index}.jpg")
    return root


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("words", [(), ("data.workers=2",)])
@pytest.mark.parametrize(
    "damage", [truncate, lambda path: path.write_text("no image"), lambda path: path.write_bytes(b""), os.remove]
)
def test_an_unreadable_image_stops_or_is_skipped(loading, tmp_path, damage, words):
    root = photo_folder(tmp_path)
    words = ("data.name=imagefolder", f"data.root={root}", "data.image_size=72", "batch_size=6", *words)
    sets = open_datasets(load(None, *words))
    for split in ("train", "val"):
        damage(root / split / "a" / "2.jpg")
    with pytest.raises(SetupError, match=r"train/a/2\.jpg cannot be read \(.+\); remove it or set data\.on_error=skip"):
        epoch(loading(sets, *words))
    with pytest.raises(SetupError, match=r"val/a/2\.jpg cannot be read"):
        list(loading(sets, *words).evaluation())
    loader = loading(sets, *words, "data.on_error=skip")
    assert len(epoch(loader)) == 1 and loader.skipped == 1
    (batch,) = loader.evaluation()
    assert batch.count == 5 and loader.skipped == 2
    assert loader.last_skipped[0].endswith("2.jpg")


def test_a_replacement_is_the_next_readable_sample(loading):
    loader = loading(photo_sets(broken=(3, 4)), "data.on_error=skip")
    labels = sorted(label for _, targets in epoch(loader) for label in targets.tolist())
    assert labels == sorted([*(set(range(24)) - {3, 4}), 5, 5])


def test_nothing_readable_is_an_error_even_when_skipping(loading):
    with pytest.raises(SetupError, match="broken on purpose"):
        epoch(loading(photo_sets(broken=range(24)), "data.on_error=skip"))


def saved(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return str(tmp_path / name)


def test_every_kind_of_image_becomes_eight_bits(tmp_path):
    red = Image.new("RGB", (12, 10), (200, 30, 40))
    deep = Image.fromarray(np.full((10, 12), 200 * 256 + 7, np.uint16))
    clear = Image.new("RGBA", (12, 10), (200, 30, 40, 128))
    cases = {
        saved(tmp_path, red, "rgb.jpg", quality=95): (200, 30, 40),
        saved(tmp_path, red.convert("CMYK"), "cmyk.jpg", quality=95): (200, 30, 40),
        saved(tmp_path, red.convert("L"), "grey.jpg"): (82, 82, 82),
        saved(tmp_path, red, "palette.gif"): (200, 30, 40),
        saved(tmp_path, clear, "alpha.png"): (200, 30, 40),
        saved(tmp_path, clear, "alpha.webp", lossless=True): (200, 30, 40),
        saved(tmp_path, deep, "deep.png"): (200, 200, 200),
        saved(tmp_path, deep, "deep.tiff"): (200, 200, 200),
        saved(tmp_path, Image.fromarray(np.full((10, 12), 99.0, np.float32)), "float.tiff"): (99, 99, 99),
        saved(tmp_path, red, "really.png.jpg", format="PNG"): (200, 30, 40),
    }
    for path, colour in cases.items():
        found = read_image(path, 3)
        assert found.shape == (3, 10, 12) and found.dtype == torch.uint8, path
        assert found[:, 5, 5].tolist() == pytest.approx(colour, abs=4), path
        assert read_image(path, 1).shape == (1, 10, 12), path


def test_a_worker_that_died_or_fell_asleep_between_epochs(loading):
    inline, loader = loading(photo_sets()), loading(photo_sets(), "data.workers=1")
    epoch(loader)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    assert same(epoch(loader, 1), epoch(inline, 1))
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(PeerError, match=r"loader worker \d+ died"):
        epoch(loader, 2)


def test_a_worker_that_dies_is_named_in_bounded_time(loading):
    loader = loading(photo_sets(train=64, hang=40), "data.workers=2")
    batches = loader.training(0)
    next(batches)
    victims = multiprocessing.active_children()
    for child in victims:
        os.kill(child.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"loader worker \d+.* died .*mine: item \d+") as error:
        list(batches)
    assert time.monotonic() - start < 10 and str(victims[0].pid) in str(error.value)


@pytest.mark.parametrize("stop", [False, True])
def test_a_worker_that_hangs_is_named_in_bounded_time(loading, stop):
    loader = loading(photo_sets(hang=None if stop else 5), "data.workers=1", "timeout=4")
    batches = loader.training(0)
    start = time.monotonic()
    if stop:
        next(batches)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match=r"loader worker \d+ did not answer for timeout=4 seconds; 8 samples from mine"):
        list(batches)
    assert time.monotonic() - start < 40


def test_workers_go_when_their_rank_is_killed_and_not_before(tmp_path):
    script = textwrap.dedent(f"""
        import multiprocessing, sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import test_loaders as t
        if __name__ == "__main__":
            recipe = t.load(None, "batch_size=8", "data.workers=2")
            batches = t.Loader(t.photo_sets(), recipe, t.Shard(), t.CPU).training(0)
            next(batches)
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            sys.stdin.readline()
            print(sum(1 for _ in batches), flush=True)
            time.sleep(1000)
    """)
    (tmp_path / "rank.py").write_text(script)
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "rank.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2
        members = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _group(pid) == rank.pid]
        for pid in members:
            if pid != rank.pid:  # torchrun's SIGTERM reaches the whole group; the rank has a handler
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "2\n"
        rank.kill()
        rank.wait(10)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(_group(pid) == rank.pid for pid in members):
            time.sleep(0.05)
        assert [pid for pid in members if _group(pid) == rank.pid] == []
    finally:
        for stream in (rank.stdin, rank.stdout):
            stream.close()
        rank.kill()
        rank.wait(10)


def _group(pid):
    """The process group of a living process, else None."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state, _, group = stat.read().rpartition(")")[2].split()[:3]
        return None if state == "Z" else int(group)
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_too_little_shared_memory_is_refused_before_the_start(tmp_path):
    with pytest.raises(SetupError, match=r"data\.workers=0.* --shm-size=\d+g"):
        workers.check_shared_memory(2**60, str(tmp_path))
    workers.check_shared_memory(2**60, "/not/here")
    workers.check_shared_memory(1, str(tmp_path))


def test_a_set_that_cannot_travel_is_explained(loading):
    sets = photo_sets()
    sets.train.items.poison = lambda: None
    with pytest.raises(RecipeError, match=r"cannot be sent to loader workers .*data\.workers=0"):
        epoch(loading(sets, "data.workers=1"))

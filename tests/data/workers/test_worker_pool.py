"""Processes that read ahead: the same batches however many there are, for training and evaluation
together.
"""

import multiprocessing
import sys
import textwrap
import time
from multiprocessing.context import ForkServerProcess

import pytest
import torch

from tests import warm
from tests.command_line import QUIET, environment, ok
from tests.data.loading import AUGMENT, Items, becomes_true, epoch, photo_sets, same
from tests.data.photo_folders import photo_set
from trainer.errors import PeerError
from trainer.saving.weights import read_weights


class Noting(Items):
    """Notes in a file what is read."""

    def __init__(self, count, path, **faults):
        super().__init__(count, **faults)
        self.path = path

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def noting_sets(folder, **faults):
    sets = photo_sets()
    for name, count in (("train", 24), ("val", 7)):
        (folder / name).touch()
        getattr(sets, name).items = Noting(count, str(folder / name), **faults)
    return sets


def read(path):
    return [int(line) for line in path.read_text().split()]


def children():
    return {child.pid for child in multiprocessing.active_children()}


def evaluated(loader, then=None):
    return [(x.inputs.clone(), x.targets.clone(), x.count) for x in loader.evaluation(then)]


def test_the_same_workers_read_training_and_evaluation(loading):
    inline = loading(photo_sets(), *AUGMENT)
    forked = loading(photo_sets(), *AUGMENT, "data.workers=2")
    seen = set()
    for number in range(3):
        assert same(epoch(forked, number), epoch(inline, number))
        assert same(evaluated(forked, number + 1), evaluated(inline))
        seen |= children()
    assert len(seen) == 2


def steps(loader, number=0):
    """Yield an epoch like the loop does, without asking for more batches than it has."""
    batches = loader.training(number)
    for _ in range(loader.steps_per_epoch):
        next(batches)


def test_the_next_batch_is_read_in_advance(loading, tmp_path):
    loader = loading(noting_sets(tmp_path), "data.workers=2")
    steps(loader)
    assert becomes_true(lambda: len(read(tmp_path / "val")) == 7), "the evaluation"
    before = len(read(tmp_path / "train"))
    evaluated(loader, then=1)
    assert becomes_true(lambda: len(read(tmp_path / "train")) >= before + 16), "the next epoch"
    assert len(read(tmp_path / "val")) == 7, "read once"
    steps(loader, 1)
    assert sorted(read(tmp_path / "train")[before:]) == list(range(24))
    assert becomes_true(lambda: len(read(tmp_path / "val")) == 14)
    evaluated(loader)
    time.sleep(0.1)
    assert len(read(tmp_path / "train")) == 48, "nothing follows the last evaluation"


def test_a_prefetched_epoch_that_is_not_used_is_dropped(loading, tmp_path):
    """The epoch starts in its middle, or is not the expected one, or is started twice."""
    inline = loading(photo_sets(), *AUGMENT)
    loader = loading(photo_sets(), *AUGMENT, "data.workers=2")
    for number, start, then in (
        (0, 0, 1),
        (5, 1, 5),
        (5, 0, 6),
        (6, 2, 9),
        (9, 0, None),
    ):
        assert same(epoch(loader, number, start), epoch(inline, number, start))
        assert same(evaluated(loader, then), evaluated(inline))
        next(loader.training(3))
    kept = loader.training(3)
    next(kept)
    assert same(evaluated(loader), evaluated(inline)) and len(children()) == 2
    with pytest.raises(RuntimeError, match="dropped"):
        next(kept)


def test_failures_are_counted_when_their_batch_is_used(loading):
    words = ("data.on_error=skip", "batch_size=4")
    inline = loading(photo_sets(broken=(3, 4)), *words)
    loader = loading(photo_sets(broken=(3, 4)), *words, "data.workers=3")
    for number in range(2):
        for _ in zip(loader.training(number), inline.training(number), strict=True):
            assert loader.skipped == inline.skipped
        assert becomes_true(loader._feeds[1]._readers.ready)
        assert loader.skipped == inline.skipped
        for _ in zip(loader.evaluation(number + 1), inline.evaluation(), strict=True):
            assert loader.skipped == inline.skipped
    assert loader.skipped == 2 * 4


class Slow(Items):
    def __getitem__(self, index):
        time.sleep(0.2 if index % 5 == 0 else 0)
        return super().__getitem__(index)


def test_batches_come_in_order_whoever_was_slow(loading):
    sets = photo_sets(40)
    plain = loading(photo_sets(40), "batch_size=2")
    sets.train.items = Slow(40)
    assert same(epoch(loading(sets, "batch_size=2", "data.workers=4")), epoch(plain))


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError()])
def test_a_fork_server_that_is_killed_as_it_forks_a_worker_is_asked_once_more(
    error, loading, monkeypatch
):
    start = ForkServerProcess._Popen
    kills = [error]

    def killed(process):
        if kills:
            raise kills.pop()
        return start(process)

    monkeypatch.setattr(ForkServerProcess, "_Popen", staticmethod(killed))
    assert same(epoch(loading(photo_sets(), "data.workers=1")), epoch(loading(photo_sets())))
    assert not kills
    kills += [error] * 2
    with pytest.raises(PeerError, match="was killed"):
        epoch(loading(photo_sets(), "data.workers=1"))


@pytest.mark.slow
def test_a_run_is_the_same_with_any_number_of_workers(tmp_path):
    photos = [
        "data.name=imagefolder",
        f"data.root={tmp_path / 'set'}",
        "data.image_size=72",
        "augment.crop=resized",
    ]
    photo_set(
        tmp_path / "set",
        {"a": 9, "b": 9},
        split=True,
        size=(100, 80),
    )
    words = [
        "model.name=cnn",
        *photos,
        "batch_size=6",
        "epochs=2",
        "threads=1",
        "mode=single",
        *QUIET,
    ]
    collected = []
    for number in ("0", "2", "null"):
        ok(*words, f"data.workers={number}", f"output={tmp_path / number}")
        collected.append(read_weights(tmp_path / number / "last.safetensors")[0])
    assert all(
        torch.equal(tensor, other[key])
        for other in collected[1:]
        for key, tensor in collected[0].items()
    )


@pytest.mark.slow
def test_a_program_that_forgets_its_loader_ends(tmp_path):
    (tmp_path / "forgets.py").write_text(
        textwrap.dedent("""
            from tests.data import loading
            from trainer.data import DataShare, Loader
            from trainer.recipe import load
            if __name__ == "__main__":
                recipe = load(None, "batch_size=8", "data.workers=2")
                loader = Loader(loading.photo_sets(), recipe, None, DataShare(), loading.CPU)
                print(len(next(loader.training(0)).targets))
            """)
    )
    command = [sys.executable, str(tmp_path / "forgets.py")]
    completed = warm.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "8\n", "")

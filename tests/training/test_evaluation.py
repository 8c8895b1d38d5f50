"""Each validation sample counts exactly once, whatever the task adds up."""

import pytest
import torch
from torch import nn

from tests.strategies import on_ranks
from trainer import tasks
from trainer.data import Batch
from trainer.distributed.world import World
from trainer.modes import Strategy
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.training.evaluation import Sums, evaluate

ALONE = World(Place(), torch.device("cpu"), 1, ("cpu",))


def task_of(name="classification", classes=3):
    names = [str(n) for n in range(classes)]
    return tasks.create_task(load(None, f"task.name={name}"), names, None, samples=100)


def test_sums_leave_padding_out():
    sums = Sums(task_of(classes=6))
    outputs = torch.eye(6) * 9
    sums.add(
        outputs,
        torch.tensor([0, 1, 0, 3, 4, 5]),
        count=3,
    )
    actual, count = sums.metrics(ALONE)
    assert (actual["top1"], actual["top5"], count) == (2 / 3, 1, 3)
    assert actual["loss"] == pytest.approx(
        nn.functional.cross_entropy(outputs[:3], torch.tensor([0, 1, 0])).item()
    )


def test_an_empty_validation_split_has_no_metric_and_no_best():
    actual, count = Sums(task_of()).metrics(ALONE)
    assert count == 0 and actual["loss"] != actual["loss"] and actual["top1"] != actual["top1"]
    assert not task_of().improves(actual["top1"], 0.1)
    assert task_of().improves(0.1, actual["top1"])


@pytest.mark.parametrize("name", ["classification", "multilabel", "regression"])
def test_ranks_without_outputs_add_nothing(name):
    """Two of the three ranks have outputs, each for its own samples, like in a pipeline."""
    outputs = torch.randn(10, 3)
    targets = torch.arange(10) % 3
    task = task_of(name)
    targets = targets if name == "classification" else nn.functional.one_hot(targets, 3).float()
    whole = Sums(task)
    parts = (slice(0), slice(0, 4), slice(4, 10))
    whole.add(outputs, targets, 10)

    def work(world):
        sums = Sums(task)
        own = parts[world.rank]
        if world.rank:
            sums.add(outputs[own], targets[own], len(outputs[own]))
        return sums.metrics(world)

    expected, _ = whole.metrics(ALONE)
    for candidate, count in on_ranks(3, work):
        assert count == 10 and candidate == pytest.approx(expected)
    assert name == "regression" or 0 < expected["auroc"] < 1


def test_every_rank_has_the_metrics_of_the_first():
    """The metrics of a user's own task may differ in the last bits, but all ranks must choose the
    same best epoch.
    """

    def work(world):
        task = task_of()
        task.metrics = lambda sums, count: {"top1": world.rank}
        sums = Sums(task)
        sums.add(
            torch.zeros(4, 3),
            torch.zeros(4, dtype=torch.int64),
            4,
        )
        return sums.metrics(world)

    for actual, count in on_ranks(2, work):
        assert (actual["top1"], count) == (0, 8)


class Fixed(Strategy):
    """Answers class 1 to everything."""

    def __init__(self):
        self.module, self.task, self.recipe = nn.Identity(), task_of(), load(None)
        self.world = ALONE

    def forward(self, inputs):
        return torch.tensor([0.0, 9.0, 0.0]).repeat(len(inputs), 1)


def batches(total, rows):
    for start in range(0, total, rows):
        count = min(rows, total - start)
        yield Batch(
            torch.zeros(rows, 1),
            torch.ones(rows, dtype=torch.int64),
            count,
        )


@pytest.mark.parametrize("total", range(1, 18))
def test_uneven_tails(total):
    seen = []
    fixed = Fixed()
    sums = Sums(fixed.task)
    actual = evaluate(fixed, batches(total, 4), sums, fixed.forward, seen.append)
    assert actual["val_samples"] == total and actual["val_top1"] == 1 and actual["val_top5"] == 1
    assert seen == list(range(1, -(-total // 4) + 1))

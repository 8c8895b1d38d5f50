"""Every held-out sample counts exactly once, whatever the task adds up."""

import pytest
import torch
from torch import nn

from tests.worlds import on_ranks
from trainer import tasks
from trainer.data import Batch
from trainer.modes import Strategy
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load
from trainer.training.evaluation import Sums, evaluate

ALONE = World(Place(), torch.device("cpu"), 1, ("cpu",))


def task_of(name="classification", classes=3):
    return tasks.create(load(None, f"task.name={name}"), [str(n) for n in range(classes)])


def test_sums_leave_padding_out():
    sums = Sums(task_of(classes=6))
    outputs = torch.eye(6) * 9
    sums.add(outputs, torch.tensor([0, 1, 0, 3, 4, 5]), count=3)
    found, count = sums.metrics(ALONE)
    assert (found["top1"], found["top5"], count) == (2 / 3, 1, 3)
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(outputs[:3], torch.tensor([0, 1, 0])).item())


def test_nothing_at_all_is_no_figure_and_no_best():
    found, count = Sums(task_of()).metrics(ALONE)
    assert count == 0 and found["loss"] != found["loss"] and found["top1"] != found["top1"]
    assert not task_of().improves(found["top1"], 0.1) and task_of().improves(0.1, found["top1"])


@pytest.mark.parametrize("name", ["classification", "multilabel", "regression"])
def test_ranks_without_outputs_add_nothing(name):
    """As in a pipeline: two of three ranks have outputs, each of its own samples."""
    outputs, targets = torch.randn(10, 3), torch.arange(10) % 3
    task = task_of(name)
    targets = targets if name == "classification" else nn.functional.one_hot(targets, 3).float()
    whole, parts = Sums(task), (slice(0), slice(0, 4), slice(4, 10))
    whole.add(outputs, targets, 10)

    def work(world):
        sums, own = Sums(task), parts[world.rank]
        if world.rank:
            sums.add(outputs[own], targets[own], len(outputs[own]))
        return sums.metrics(world)

    expected, _ = whole.metrics(ALONE)
    for found, count in on_ranks(3, work):
        assert count == 10 and found == pytest.approx(expected)


def test_every_rank_has_the_metrics_of_the_first():
    """Those of a user's own task may differ in the last bits, and all ranks must agree on which epoch is the best."""

    def work(world):
        task = task_of()
        task.metrics = lambda sums, count: {"top1": world.rank}
        sums = Sums(task)
        sums.add(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), 4)
        return sums.metrics(world)

    assert on_ranks(2, work) == [({"top1": 0}, 8)] * 2


class Fixed(Strategy):
    """Answers class 1 to everything."""

    def __init__(self):
        self.module, self.task, self.recipe = nn.Identity(), task_of(), load(None)

    def forward(self, inputs):
        return torch.tensor([0.0, 9.0, 0.0]).repeat(len(inputs), 1)


def batches(total, rows):
    for start in range(0, total, rows):
        count = min(rows, total - start)
        yield Batch(torch.zeros(rows, 1), torch.ones(rows, dtype=torch.int64), count)


@pytest.mark.parametrize("total", range(1, 18))
def test_uneven_tails(total):
    seen = []
    found = evaluate(Fixed(), batches(total, 4), ALONE, seen.append)
    assert found["val_samples"] == total and found["val_top1"] == 1 and found["val_top5"] == 1
    assert seen == list(range(1, -(-total // 4) + 1))

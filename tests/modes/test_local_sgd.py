"""Local SGD: the averages, their weights and their steps; and whole runs that are killed, resumed
and evaluated.
"""

import math
import re
import shutil
from functools import partial

import pytest
import torch
from torch import nn

from tests.command_line import QUIET, ok, result, trainer
from tests.strategies import create_strategy, gathered, on_ranks
from trainer.modes import local_sgd
from trainer.recipe import load
from trainer.saving.journal import JOURNAL, read_journal

SHAPE = (4, 2, 3, 3)


def build(world, *words, samples=10_003):
    """A small network with BatchNorm under local SGD, the same on every rank."""
    plain = {"mode": "local_sgd", "local_sgd": {"outer_momentum": 0.0}}
    strategy = create_strategy(load(plain, *words), world, SHAPE, classes=5, samples=samples)
    layers = [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(27, 5),
    ]
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    strategy.setup(model)
    return strategy


def tensors(strategy):
    return {**strategy.named_parameters(), **strategy.named_buffers()}


def clones(named):
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def scatter(strategy):
    """Give each rank its own values."""
    generator = torch.Generator().manual_seed(7 + strategy.world.rank)
    for tensor in tensors(strategy).values():
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.fill_(3 + strategy.world.rank)


@pytest.mark.parametrize("bucket", [1, 20, 2**24])
def test_averages_are_weighted_by_samples(bucket, monkeypatch):
    """10,003 images over 4 workers: 2500, 2500, 2500, 2503. Weights, running statistics and moving
    averages alike.
    """
    monkeypatch.setattr(local_sgd, "BUCKET", bucket)

    def work(world):
        strategy = build(world)
        scatter(strategy)
        ema = {
            "w": torch.full(
                (2,),
                float(world.rank),
                dtype=torch.float64,
            )
        }
        before = clones(tensors(strategy))
        average = gathered(strategy, tensors(strategy))
        untouched = clones(tensors(strategy))
        strategy.after_epoch(ema)
        return before, untouched, average, clones(tensors(strategy)), ema["w"]

    ranks = on_ranks(4, work)
    for name, first in ranks[0][0].items():
        everyone = torch.stack([rank[0][name].double() for rank in ranks])
        weights = torch.tensor([2500, 2500, 2500, 2503], dtype=torch.float64) / 10_003
        mean = torch.tensordot(weights, everyone, 1).to(first.dtype)
        expected = mean if first.is_floating_point() else first
        assert torch.equal(ranks[0][2][name], ranks[0][3][name])
        for before, untouched, _, after, _ in ranks:
            torch.testing.assert_close(after[name], expected, rtol=1e-7, atol=1e-7)
            assert torch.equal(untouched[name], before[name]), "a save must not change the training"
            assert torch.equal(after[name], ranks[0][3][name])
    for rank in ranks:
        assert rank[4].tolist() == pytest.approx(
            [(2500 * 0 + 2500 * 1 + 2500 * 2 + 2503 * 3) / 10_003] * 2, rel=1e-12
        )


OUTER = ["local_sgd.outer_lr=0.7", "local_sgd.outer_momentum=0.9"]


@pytest.mark.parametrize("words", [[], OUTER], ids=["plain", "outer"])
def test_averaging_twice_changes_nothing(words):
    """A run that is stopped between the last step of an epoch and its averaging, or after it, ends
    the same; and so does one whose last step was averaged.
    """

    def work(world):
        strategy = build(world, "local_sgd.every=2", *words)
        same = []
        for first in (partial(strategy.after_epoch, {}), partial(strategy.after_step, 2)):
            scatter(strategy)
            first()
            once = clones(tensors(strategy) | strategy.outer_state())
            strategy.after_epoch({})
            now = tensors(strategy) | strategy.outer_state()
            same.append(all(torch.equal(once[name], tensor) for name, tensor in now.items()))
        return same

    assert on_ranks(3, work) == [[True, True]] * 3


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.5)])
def test_an_averaging_is_a_step_of_torchs_sgd_towards_the_weighted_average(lr, momentum):
    """Averaged in an epoch and at its end: 2500, 2500, 2500 and 2503 images. Statistics are
    averaged and not stepped, what is frozen stays."""

    def work(world):
        strategy = build(
            world,
            "local_sgd.every=2",
            f"local_sgd.outer_lr={lr}",
            f"local_sgd.outer_momentum={momentum}",
        )
        frozen = strategy.module[3].bias
        frozen.requires_grad = False
        strategy.connect()
        assert "3.bias//anchor" not in strategy.outer_state()
        generator = torch.Generator().manual_seed(world.rank)
        history = [clones(tensors(strategy))]
        in_epoch = partial(strategy.after_step, 2)
        at_its_end = partial(strategy.after_epoch, {})
        for average in (in_epoch, at_its_end, in_epoch):
            for tensor in tensors(strategy).values():
                if tensor.is_floating_point() and tensor is not frozen:
                    tensor.data += torch.randn(tensor.shape, generator=generator)
            trained = clones(tensors(strategy))
            strategy.after_step(3)  # This step averages nothing.
            average()
            history.append((trained, clones(tensors(strategy))))
        return history

    ranks = on_ranks(4, work)
    share = torch.tensor([2500, 2500, 2500, 2503], dtype=torch.float64) / 10_003
    first = ranks[0][0]
    trained = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight")
    weights = {name: nn.Parameter(first[name].double()) for name in trained}
    outer = torch.optim.SGD(
        weights.values(),
        lr=lr,
        momentum=momentum,
        nesterov=momentum > 0,
    )
    for turn in (1, 2, 3):
        for name, tensor in first.items():
            everyone = torch.stack([rank[turn][0][name].double() for rank in ranks])
            mean = torch.tensordot(share, everyone, 1)
            if name in weights:
                weights[name].grad = weights[name].detach() - mean
            elif tensor.is_floating_point():
                torch.testing.assert_close(
                    ranks[0][turn][1][name].double(),
                    mean,
                    rtol=1e-6,
                    atol=1e-6,
                )
        outer.step()
        for rank in ranks:
            assert torch.equal(rank[turn][1]["3.bias"], first["3.bias"])
            for name, weight in weights.items():
                torch.testing.assert_close(
                    rank[turn][1][name].double(),
                    weight.detach(),
                    rtol=1e-5,
                    atol=1e-5,
                )
                assert torch.equal(rank[turn][1][name], ranks[0][turn][1][name]), (
                    "workers go on from one place"
                )


def test_plain_averaging_keeps_nothing():
    """`outer_lr=1 outer_momentum=0` is the average itself; without momentum there is one copy of
    the weights.
    """
    kept = {}
    for lr, momentum in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.5)):
        words = [f"local_sgd.outer_lr={lr}", f"local_sgd.outer_momentum={momentum}"]
        kept[lr, momentum] = [
            {
                len(state)
                for state in on_ranks(
                    size, lambda world, words=words: build(world, *words).outer_state()
                )
            }
            for size in (1, 2)
        ]
    weights = 6  # Weights of a convolution, a BatchNorm and a linear layer.
    assert kept == {
        (1.0, 0.0): [{0}, {0}],
        (0.5, 0.0): [{0}, {weights}],
        (1.0, 0.5): [{0}, {2 * weights}],
    }


def test_weights_of_a_checkpoint_that_holds_no_outer_state_are_where_it_begins():
    def work(world):
        strategy = build(world, *OUTER)
        for parameter in strategy.named_parameters().values():
            parameter.data += 1
        strategy.load_outer_state({})
        before = clones(tensors(strategy))
        strategy.after_epoch({})
        return all(torch.equal(before[name], tensor) for name, tensor in tensors(strategy).items())

    assert on_ranks(2, work) == [True, True]


# ----------------------------------------------------------------------------------------------
# whole runs

SHORT = ["data.name=synthetic", "data.image_size=8", "data.val_samples=30", "model.name=cnn_gn"]
# 6 steps an epoch.
SHORT += [
    "schedule.name=constant",
    "data.samples=192",
    "batch_size=32",
    "epochs=2",
    *QUIET,
]
SHORT += ["local_sgd.every=4", *OUTER]
LOCAL = [*SHORT, "mode=local_sgd"]


@pytest.mark.slow
def test_other_workers_and_modes_convert_the_outer_optimizer(tmp_path):
    """The run is saved at step 5, between averagings.

    The last average and the momentum are those of the present number of workers. A mode without
    them reports that, and local SGD reports it afterwards, too.
    """
    run = tmp_path / "run"
    killed = trainer(
        *LOCAL, "nproc=2", "save.every_steps=5", f"output={run}", env={"TRAINER_FAULT": "kill@1:6"}
    )
    assert killed.returncode == 7, killed.stderr
    shutil.copytree(run, tmp_path / "other")
    shutil.copytree(run, tmp_path / "wider")
    wider = ok(*LOCAL, "nproc=4", f"output={tmp_path / 'wider'}", "resume=auto").stdout
    attempts, _ = read_journal(tmp_path / "wider" / JOURNAL)
    assert attempts[-1].resumed == 5
    assert "outer" not in wider
    words = [*SHORT, "nproc=2", f"output={tmp_path / 'other'}", "resume=auto"]
    other = trainer(*words, "mode=ddp", "save.every_steps=1", env={"TRAINER_FAULT": "kill@1:9"})
    assert re.search("local_sgd.* optimizer .*dropped", other.stdout)
    attempts, _ = read_journal(tmp_path / "other" / JOURNAL)
    assert attempts[-1].resumed == 5
    again = ok(*words, "mode=local_sgd")
    assert re.search("local_sgd.* optimizer .*scratch", again.stdout)
    assert math.isfinite(result(tmp_path / "other")["val_loss"])


def test_momentum_is_the_default_of_averages_within_an_epoch():
    assert load(None, "mode=local_sgd").local_sgd.outer_copies == 0
    assert load(None, "mode=local_sgd", "local_sgd.every=4").local_sgd.momentum == 0.5
    assert (
        load(
            None, "mode=local_sgd", "local_sgd.every=4", "local_sgd.outer_momentum=0"
        ).local_sgd.outer_copies
        == 0
    )

"""Local SGD: the averages, their weights and their steps; and whole runs that are killed, resumed
and evaluated.
"""

import math
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import QUIET, ok, result, trainer
from tests.strategies import create_strategy, gathered, on_ranks
from trainer.errors import RecipeError
from trainer.modes import local_sgd
from trainer.recipe import load
from trainer.recipe.checks import check_options
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


# Streaming: (fragments, delay, compress, momentum). Each fragment is sent every 6 steps.
STREAMS = [(3, 0, None, 0.9), (1, 2, None, 0.0), (3, 5, None, 0.9), (2, 3, "bf16", 0.5)]
STREAMED = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")


def stream_plainly(start, changes, compress, delay, fragments, momentum):
    """Return the workers' weights after 13 steps and the end of an epoch, by algorithm 2 of
    Streaming DiLoCo (arXiv:2501.18512) in plain Python.

    Args:
        start: The first weights by name.
        changes: For each worker and step, what it adds to its weights.
        fragments: {name: step at which it is sent first}.
    """
    share = [2500 / 10_003] * 3 + [2503 / 10_003]
    workers = [dict(start) for _ in share]
    outer = dict(start)
    velocity = dict.fromkeys(start, 0.0)
    sent = {}

    def move(name, gradient):
        velocity[name] = momentum * velocity[name] + gradient
        outer[name] = outer[name] - 0.7 * (gradient + momentum * velocity[name])

    def merge(name):
        move(name, sent.pop(name)[1])
        own = 0.5 if delay else 0.0
        for worker in workers:
            worker[name] = own * worker[name] + (1 - own) * outer[name]

    for step in range(1, 14):
        for name, first in fragments.items():
            for worker, steps in zip(workers, changes, strict=True):
                worker[name] = worker[name] + steps[step - 1][name]
            if step % 6 == first % 6:
                gradients = [
                    part * (outer[name] - worker[name])
                    for part, worker in zip(share, workers, strict=True)
                ]
                if compress:
                    gradients = [gradient.bfloat16().double() for gradient in gradients]
                sent[name] = step, sum(gradients)
            if name in sent and step == sent[name][0] + delay:
                merge(name)
    for name in list(sent):
        merge(name)
    for name in start:
        average = sum(part * worker[name] for part, worker in zip(share, workers, strict=True))
        # No step if the weights are those of the last step.
        if any(not torch.equal(worker[name], outer[name]) for worker in workers):
            move(name, outer[name] - average)
    return outer


@pytest.mark.parametrize(("fragments", "delay", "compress", "momentum"), STREAMS)
def test_streaming_is_that_of_a_plain_loop(fragments, delay, compress, momentum):
    """No step waits for a fragment that is not due."""
    words = [
        "local_sgd.every=6",
        f"local_sgd.fragments={fragments}",
        f"local_sgd.delay={delay}",
        f"local_sgd.compress={compress or 'null'}",
        "local_sgd.outer_lr=0.7",
        f"local_sgd.outer_momentum={momentum}",
    ]
    phases = [6 * n // fragments for n in range(1, fragments + 1)]

    def work(world):
        strategy = build(world, *words)
        generator = torch.Generator().manual_seed(world.rank)
        start = clones(strategy.named_parameters())
        changes = []
        waits = []
        messages = set()
        start_sum = world.start_sum

        def send(values):
            messages.add(values.dtype)
            return start_sum(values)

        world.start_sum = send
        world.wait = lambda work: waits.append(step)
        for step in range(1, 14):
            change = {}
            for name, weight in strategy.named_parameters().items():
                change[name] = torch.randn(weight.shape, generator=generator)
                weight.data += change[name]
            changes.append(change)
            strategy.after_step(step)
        within = clones(strategy.named_parameters())
        strategy.after_epoch({})
        first = {name: part.phase for part in strategy.fragments for name in part._names}
        arrivals = [step + delay for step in range(1, 14) if step % 6 in {n % 6 for n in phases}]
        assert waits == [min(13, step) for step in arrivals]
        assert messages == {torch.bfloat16 if compress else torch.float32}
        return start, changes, within, clones(strategy.named_parameters()), first

    ranks = on_ranks(4, work)
    start = {name: tensor.double() for name, tensor in ranks[0][0].items()}
    first = ranks[0][4]
    assert tuple(first) == STREAMED
    assert sorted(set(first.values())) == phases
    changes = [
        [{name: tensor.double() for name, tensor in step.items()} for step in rank[1]]
        for rank in ranks
    ]
    expected = stream_plainly(start, changes, compress, delay, first, momentum)
    assert not torch.equal(ranks[0][2]["0.weight"], ranks[1][2]["0.weight"])
    tolerance = 3e-2 if compress else 1e-5
    for rank in ranks:
        for name, tensor in rank[3].items():
            assert torch.equal(tensor, ranks[0][3][name])
            torch.testing.assert_close(
                tensor.double(), expected[name], rtol=tolerance, atol=tolerance
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


STREAMING = [*LOCAL, "nproc=2", "local_sgd.fragments=2", "local_sgd.delay=3"]
STREAMING += ["local_sgd.compress=bf16"]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "run"
    ok(*STREAMING, f"output={folder}")
    return load_file(folder / "last.safetensors")


@pytest.mark.slow
@pytest.mark.full(but=["4", "7"])
@pytest.mark.parametrize("step", range(1, 9))
def test_a_run_resumes_while_a_fragment_is_exchanged(step, streamed, tmp_path):
    """Fragments are sent at steps 2, 4, 6, ... and arrive 3 steps later, or at the end of an epoch,
    which has 6 steps.
    """
    words = [*STREAMING, "save.every_steps=1", f"output={tmp_path / 'run'}"]
    killed = trainer(*words, env={"TRAINER_FAULT": f"kill@1:{step + 1}"})
    assert killed.returncode == 7, killed.stderr
    ok(*words, "resume=auto")
    attempts, _ = read_journal(tmp_path / "run" / JOURNAL)
    assert attempts[-1].resumed == step
    resumed = load_file(tmp_path / "run" / "last.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in streamed.items())


def test_fragments_are_consecutive_and_of_about_equal_sizes():
    sizes = {"a": 6, "b": 2, "c": 4, "d": 8, "empty": 0}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    fragments = local_sgd.split_evenly(parameters, 2)
    assert [[*fragment] for fragment in fragments] == [["a", "b", "c"], ["d", "empty"]]
    large = {"a": 1, "b": 98, "c": 1}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in large.items()}
    assert [[*part] for part in local_sgd.split_evenly(parameters, 4)] == [["a"], ["b"], ["c"]]


def test_a_delay_needs_more_steps_between_averages():
    for words in ("every=4 delay=4", "every=4 fragments=5"):
        words = [f"local_sgd.{word}" for word in words.split()]
        with pytest.raises(RecipeError, match=r"set local_sgd\.every=5 "):
            check_options(load(None, "mode=local_sgd", *words))


def test_momentum_is_the_default_of_averages_within_an_epoch():
    assert load(None, "mode=local_sgd").local_sgd.outer_copies == 0
    assert load(None, "mode=local_sgd", "local_sgd.every=4").local_sgd.momentum == 0.5
    assert (
        load(
            None, "mode=local_sgd", "local_sgd.every=4", "local_sgd.outer_momentum=0"
        ).local_sgd.outer_copies
        == 0
    )

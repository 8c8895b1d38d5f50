"""Learning rate against torch's schedulers, the finite guard, clipping, the moving average."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.command_line import QUIET, ok, steps
from tests.optim.rows import NAMES
from tests.strategies import create_strategy
from trainer.distributed.world import World
from trainer.modes import Strategy
from trainer.optim.optimization import (
    MovingAverage,
    Updater,
    build_learning_rate,
    build_loss_scaler,
)
from trainer.optim.optimizers import build_optimizer, name_optimizer_state
from trainer.optim.trainable import find_roles
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.recipe.schedule_table import LR_SCHEDULES
from trainer.saving.tensor_files import Shard, StoredTensor

STEPS = 7  # Number of steps in an epoch.
CPU = torch.device("cpu")
ALONE = World(Place(), CPU, 1, ("cpu",))


class Alone(Strategy):
    """A strategy around a module, without a world, and what updates the module."""

    def __init__(self, module, *words):
        self.module = module
        self.world = ALONE
        self._parameters = list(module.parameters())
        recipe = load(None, *words)
        self.optimizer = build_optimizer(
            dict(module.named_parameters()), recipe.optimizer, find_roles(module, recipe)
        )
        self.updater = Updater(self.optimizer, recipe, CPU, build_loss_scaler(recipe, CPU))

    def step(self, loss, factor=1.0):
        """Take one step with the loss's gradient times `factor`.

        Return the norm, and whether parameters moved; {True} means all.
        """
        before = [p.detach().clone() for p in self._parameters]
        self.optimizer.zero_grad()
        scaled = self.updater.scaler.scale(loss) if self.updater.scaler else loss
        (scaled * factor).backward()
        norm = self.updater.step(loss.detach(), self, want_norm=False)
        return norm, {not torch.equal(*pair) for pair in zip(before, self._parameters, strict=True)}


def by_torch(recipe, schedule, count):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    warmup = round(recipe.schedule.warmup_epochs * STEPS)
    scheduler = schedule(optimizer, warmup)
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, recipe.schedule.warmup_factor, 1.0, warmup)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, scheduler], [warmup])
    collected = []
    for _ in range(count):
        collected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return collected


# Arguments of each schedule, and torch's scheduler for an optimizer after the steps of warm-up.
TORCHS = {
    "constant": ([], lambda o, w: lr_scheduler.ConstantLR(o, 1.0)),
    "cosine": (
        ["schedule.min_lr=0.01"],
        lambda o, w: lr_scheduler.CosineAnnealingLR(o, 10 * STEPS - w, 0.01),
    ),
    "step": (["schedule.step_epochs=2"], lambda o, w: lr_scheduler.StepLR(o, 2 * STEPS, 0.1)),
    "exponential": (["schedule.gamma=0.8"], lambda o, w: lr_scheduler.StepLR(o, STEPS, 0.8)),
    "polynomial": (
        ["schedule.power=1.5"],
        lambda o, w: lr_scheduler.PolynomialLR(o, 10 * STEPS - w, 1.5),
    ),
    # The metric lowers the rate as well, see `tests/training/test_plateau.py`.
    "plateau": ([], lambda o, w: lr_scheduler.ConstantLR(o, 1.0)),
}


@pytest.mark.parametrize("warmup", [0, 1, 2.5])
@pytest.mark.parametrize("name", LR_SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_learning_rate_is_torchs(name, warmup):
    words, schedule = TORCHS[name]
    recipe = load(
        None, "epochs=10", f"schedule.warmup_epochs={warmup}", f"schedule.name={name}", *words
    )
    ours = [build_learning_rate(recipe, STEPS, 10 * STEPS)(step) for step in range(10 * STEPS)]
    assert ours == pytest.approx(
        by_torch(recipe, schedule, 10 * STEPS),
        rel=1e-9,
        abs=1e-12,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("restarts", "over"), [([4, 7], 3), ([2, 3, 4, 5, 6, 7, 8, 9], 1)])
def test_a_restarted_cosine_is_torchs(restarts, over):
    words = [
        "epochs=10",
        "schedule.warmup_epochs=1",
        "schedule.min_lr=0.01",
        f"schedule.restart={restarts}",
    ]
    recipe = load(None, *words)
    ours = [build_learning_rate(recipe, STEPS, 10 * STEPS)(step) for step in range(10 * STEPS)]
    torchs = lr_scheduler.CosineAnnealingWarmRestarts
    reference = by_torch(
        recipe,
        lambda o, w: torchs(o, over * STEPS, 1, 0.01),
        10 * STEPS,
    )
    assert ours == pytest.approx(reference, rel=1e-9, abs=1e-12)
    assert ours.count(recipe.peak_lr) == len(restarts) + 1
    late = [
        build_learning_rate(load(recipe.to_dict() | {"epochs": 2}), STEPS, 2 * STEPS)(step)
        for step in range(2 * STEPS)
    ]
    plain = load(None, *words[1:3], "epochs=2")  # The end of warm-up comes first.
    assert late == [build_learning_rate(plain, STEPS, 2 * STEPS)(step) for step in range(2 * STEPS)]


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_the_rates_of_a_run_are_the_plain_formulas(name, tmp_path):
    """The rates are those of the optimizer, step by step, in a run that max_steps ends within an
    epoch.
    """
    own = {
        "cosine": ["schedule.min_lr=0.002"],
        "step": ["schedule.step_epochs=1", "schedule.gamma=0.5"],
        "exponential": ["schedule.gamma=0.5"],
        "polynomial": ["schedule.min_lr=0.002", "schedule.power=2"],
    }
    words = [
        "optimizer.lr=0.05",
        "optimizer.lr_per=128",
        f"schedule.name={name}",
        *own.get(name, []),
    ]
    words += ["schedule.warmup_epochs=1.5", "schedule.warmup_factor=0.1"]
    words += [
        "epochs=5",
        "max_steps=22",
        "batch_size=256",
        "model.name=mlp",
        f"output={tmp_path / 'run'}",
        *QUIET,
    ]
    ok("recipe=digits_single", *words)
    rows = steps(tmp_path / "run")
    each = sum(row["epoch"] == "1" for row in rows)
    rising = round(1.5 * each)
    top = 0.05 * 256 / 128
    low = 0.002
    assert len(rows) == 22 and each == 5
    after = {
        "constant": lambda n: top,
        "cosine": lambda n: low + (top - low) * math.cos(math.pi / 2 * n / (22 - rising)) ** 2,
        "step": lambda n: top / 2 ** (n // each),
        "exponential": lambda n: top / 2 ** (n // each),
        "polynomial": lambda n: low + (top - low) * (1 - n / (22 - rising)) ** 2,
        "plateau": lambda n: top,
    }[name]
    for n, row in enumerate(rows):
        expected = top * (0.1 + 0.9 * n / rising) if n < rising else after(n - rising)
        assert float(row["lr"]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_stops_all_updates(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    alone = Alone(model, f"optimizer.name={name}", "optimizer.weight_decay=0.1")
    named = dict(model.named_parameters())

    def after(value):
        """Weights and the optimizer's state after a step on inputs of this value; and which of the
        former moved.
        """
        _, moved = alone.step(model(torch.full((1, 3), value)).sum())
        tensors = (*named.values(), *name_optimizer_state(alone.optimizer, named).values())
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), moved

    before, moved = after(1.0)
    assert moved == {True}
    assert torch.equal(after(torch.nan)[0], before)
    assert alone.updater.bad.item() == 1
    assert torch.equal(after(1.0)[0], before), (
        "the flag is sticky: later updates are skipped as well"
    )


IN_TORCH = [name for name, row in OPTIMIZERS.items() if hasattr(torch.optim, row.class_name)]


@pytest.mark.parametrize("name", IN_TORCH)
def test_the_guarded_step_is_torchs(name):
    torch.manual_seed(0)
    ours = nn.Linear(3, 2)
    reference = nn.Linear(3, 2)
    reference.load_state_dict(ours.state_dict())
    alone = Alone(
        ours, f"optimizer.name={name}", "optimizer.weight_decay=0.01", "optimizer.lr=0.01"
    )
    row = OPTIMIZERS[name]
    optimizer_class = getattr(torch.optim, row.class_name)
    options = {key: getattr(load(None).optimizer, key) for key in row.keys}
    plain = optimizer_class(reference.parameters(), lr=0.01, weight_decay=0.01, **options)
    for _ in range(5):
        x = torch.randn(4, 3)
        alone.step(ours(x).square().sum())
        plain.zero_grad()
        reference(x).square().sum().backward()
        plain.step()
    torch.testing.assert_close(
        ours.state_dict(),
        reference.state_dict(),
        rtol=1e-6,
        atol=1e-7,
    )


def test_clipping():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    alone = Alone(model, "clip_grad_norm=0.5", "optimizer.lr=1", "optimizer.momentum=0")
    norm, _ = alone.step(model(torch.tensor([[3.0, 4.0]])).sum())
    assert norm.item() == pytest.approx(5)
    assert (before - model.weight).norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_fp16_skips_one_overflow_and_goes_on(name):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    alone = Alone(
        model, "precision=fp16", "optimizer.lr=1", "optimizer.momentum=0", f"optimizer.name={name}"
    )
    moved = [alone.step(model(torch.ones(1, 2)).sum(), factor)[1] for factor in (math.inf, 1.0)]
    assert moved == [{False}, {True}] and alone.updater.bad.item() == 0
    assert alone.updater.state()["scale"].item() == 2.0**15, "halved once"


def test_a_frozen_stage_learns_of_an_fp16_overflow_in_others():
    class Elsewhere(Alone):
        def reduce_overflow(self, flag):
            flag.fill_(1)

    stage = Elsewhere(nn.Identity(), "precision=fp16")
    stage.updater.step(torch.zeros(()), stage, want_norm=False)
    assert stage.updater.state()["scale"].item() == 2.0**15, (
        "halved, as on the ranks that have gradients"
    )


def test_fp16_that_never_becomes_finite_is_bad():
    model = nn.Linear(2, 1, bias=False)
    verdicts = []
    alone = Alone(model, "precision=fp16")
    for _ in range(40):
        alone.step(model(torch.ones(1, 2)).sum(), math.inf)
        verdicts.append(alone.updater.is_bad())
    assert not any(verdicts[:20]) and verdicts[-1]


def stored(tensors):
    return {name: StoredTensor([Shard(each, each.shape)]) for name, each in tensors.items()}


def test_optimizer_state_travels_by_name():
    model = nn.Linear(2, 2)
    named = dict(model.named_parameters())
    recipe = load(None).optimizer
    optimizer = build_optimizer(named, recipe)
    optimizer.state[model.bias]["momentum_buffer"].fill_(3)
    saved = {key: value.clone() for key, value in name_optimizer_state(optimizer, named).items()}
    assert set(saved) == {"weight//momentum_buffer", "bias//momentum_buffer"}
    reordered = {"bias": model.bias, "weight": model.weight}
    fresh = build_optimizer(reordered, recipe)
    strategy = Alone(model)
    strategy.scatter(stored(saved), name_optimizer_state(fresh, reordered))
    assert fresh.state[model.bias]["momentum_buffer"].tolist() == [3, 3]
    other = build_optimizer(named, load(None, "optimizer.name=adam").optimizer)
    with pytest.raises(ValueError, match=r"weight//step .*\(\)$"):
        strategy.scatter(stored(saved), name_optimizer_state(other, named))


def test_moving_average():
    live = {"w": torch.tensor([0.0]), "count": torch.tensor(0)}
    average = MovingAverage(live, decay=0.5)
    expected = 0.0
    for step in range(1, 4):
        live["w"].fill_(step)
        live["count"].fill_(step)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.tensors()["w"].item() == pytest.approx(expected)
    assert average.tensors()["count"].item() == 3


def test_the_model_computes_with_its_averages_inside_a_block_and_with_its_weights_after_it():
    strategy = create_strategy(
        load(None, "mode=single", "channels_last=false"),
        ALONE,
        (2, 3),
        classes=2,
    )
    strategy.setup(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    live = {**strategy.named_parameters(), **strategy.named_buffers()}
    averages = MovingAverage(live, decay=0.5).tensors()
    averages["0.weight"].fill_(2.0)
    averages["1.running_mean"].fill_(1.0)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    strategy.train(False)
    with strategy.weights(averages):
        inside = strategy.forward(torch.ones(2, 3))
        assert live["0.weight"].unique().tolist() == [2.0]
        assert live["1.running_mean"].tolist() == [
            1.0,
            1.0,
        ]
    torch.testing.assert_close(live, before, rtol=0, atol=0)
    assert averages["0.weight"].unique().tolist() == [2.0], "and the averages are what they were"
    assert not inside.equal(strategy.forward(torch.ones(2, 3)))
    with strategy.weights({}):
        torch.testing.assert_close(live, before, rtol=0, atol=0)

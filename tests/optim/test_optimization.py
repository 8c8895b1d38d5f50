"""Learning rate against torch's schedulers, the finite guard, clipping, the moving average."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    SequentialLR,
    StepLR,
)

from tests.command_line import QUIET, ok, steps
from tests.contexts import mode_of
from trainer.modes import Strategy
from trainer.optim.optimization import LR_SCHEDULES, MovingAverage, Updater, learning_rate, loss_scaler
from trainer.optim.optimizers import build_optimizer, optimizer_state
from trainer.optim.trainable import roles_of
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load
from trainer.saving.tensor_files import whole

STEPS = 7  # in an epoch
CPU = torch.device("cpu")
ALONE = World(Place(), CPU, 1, ("cpu",))


def updater_of(optimizer, recipe):
    return Updater(optimizer, recipe, CPU, loss_scaler(recipe, CPU))


class Alone(Strategy):
    """A strategy around a module, without a world."""

    def __init__(self, module):
        self.module, self.world = module, ALONE
        self._parameters = list(module.parameters())


def by_torch(recipe, schedule, count):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    warmup = round(recipe.schedule.warmup_epochs * STEPS)
    parts = [schedule(optimizer, warmup)]
    scheduler = parts[0]
    if warmup:
        rising = LinearLR(optimizer, recipe.schedule.warmup_factor, 1.0, warmup)
        scheduler = SequentialLR(optimizer, [rising, *parts], [warmup])
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 2.5])
@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        (["schedule.name=constant"], lambda o, w: ConstantLR(o, 1.0)),
        (["schedule.name=cosine", "schedule.min_lr=0.01"], lambda o, w: CosineAnnealingLR(o, 10 * STEPS - w, 0.01)),
        (["schedule.name=step", "schedule.step_epochs=2"], lambda o, w: StepLR(o, 2 * STEPS, 0.1)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_learning_rate_is_torchs(words, schedule, warmup):
    recipe = load(None, "epochs=10", f"schedule.warmup_epochs={warmup}", *words)
    ours = [learning_rate(recipe, STEPS)(step) for step in range(10 * STEPS)]
    assert ours == pytest.approx(by_torch(recipe, schedule, 10 * STEPS), rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("restarts", "over"), [([4, 7], 3), ([2, 3, 4, 5, 6, 7, 8, 9], 1)])
def test_a_cosine_that_begins_anew_is_torchs(restarts, over):
    words = ["epochs=10", "schedule.warmup_epochs=1", "schedule.min_lr=0.01", f"schedule.restart={restarts}"]
    recipe = load(None, *words)
    ours = [learning_rate(recipe, STEPS)(step) for step in range(10 * STEPS)]
    theirs = by_torch(recipe, lambda o, w: CosineAnnealingWarmRestarts(o, over * STEPS, 1, 0.01), 10 * STEPS)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12) and ours.count(recipe.peak_lr) == len(restarts) + 1
    late = [learning_rate(load(recipe.to_dict() | {"epochs": 2}), STEPS)(step) for step in range(2 * STEPS)]
    plain = load(None, *words[1:3], "epochs=2")  # whose end comes first
    assert late == [learning_rate(plain, STEPS)(step) for step in range(2 * STEPS)]


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_the_rates_of_a_run_are_the_plain_formulas(name, tmp_path):
    """As the optimizer has them, step by step, in a run that max_steps ends within an epoch."""
    own = {"cosine": ["schedule.min_lr=0.002"], "step": ["schedule.step_epochs=1", "schedule.gamma=0.5"]}
    words = ["optimizer.lr=0.05", "optimizer.lr_per=128", f"schedule.name={name}", *own.get(name, [])]
    words += ["schedule.warmup_epochs=1.5", "schedule.warmup_factor=0.1"]
    words += ["epochs=5", "max_steps=22", "batch_size=256", "model.name=mlp", f"output={tmp_path / 'run'}", *QUIET]
    ok("recipe=digits_single", *words)
    rows = steps(tmp_path / "run")
    each = sum(row["epoch"] == "1" for row in rows)
    rising, top, low = round(1.5 * each), 0.05 * 256 / 128, 0.002
    assert len(rows) == 22 and each == 5
    after = {
        "constant": lambda n: top,
        "cosine": lambda n: low + (top - low) * math.cos(math.pi / 2 * n / (22 - rising)) ** 2,
        "step": lambda n: top / 2 ** (n // each),
    }[name]
    for n, row in enumerate(rows):
        expected = top * (0.1 + 0.9 * n / rising) if n < rising else after(n - rising)
        assert float(row["lr"]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_a_gradient_that_is_not_finite_stops_all_updates(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    recipe = load(None, f"optimizer.name={name}", "optimizer.weight_decay=0.1")
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named, recipe.optimizer, roles_of(model, recipe))
    updater, strategy = updater_of(optimizer, recipe), Alone(model)

    def step(poison):
        loss = model(torch.full((1, 3), torch.nan if poison else 1.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        updater.step(loss.detach(), strategy, want_norm=False)
        return here()

    def here():
        return torch.cat(
            [t.detach().reshape(-1) for t in (*named.values(), *optimizer_state(optimizer, named).values())]
        )

    untrained = here()
    before = step(poison=False)
    assert not torch.equal(before, untrained)
    assert torch.equal(step(poison=True), before) and updater.bad.item() == 1
    assert torch.equal(step(poison=False), before), "the flag is sticky: later updates are skipped as well"


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_the_guarded_fused_step_is_torchs(name):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    recipe = load(None, f"optimizer.name={name}", "optimizer.weight_decay=0.01", "optimizer.lr=0.01")
    optimizer = build_optimizer(dict(ours.named_parameters()), recipe.optimizer)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    plain = kind(theirs.parameters(), lr=0.01, weight_decay=0.01, **({"momentum": 0.9} if name == "sgd" else {}))
    updater, strategy = updater_of(optimizer, recipe), Alone(ours)
    for _ in range(5):
        x = torch.randn(4, 3)
        for model, stepper in ((ours, optimizer), (theirs, plain)):
            stepper.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            updater.step(loss.detach(), strategy, want_norm=False) if model is ours else stepper.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


def test_clipping():
    model = nn.Linear(2, 1, bias=False)
    recipe = load(None, "clip_grad_norm=0.5", "optimizer.lr=1", "optimizer.momentum=0")
    optimizer = build_optimizer(dict(model.named_parameters()), recipe.optimizer)
    before = model.weight.detach().clone()
    loss = model(torch.tensor([[3.0, 4.0]])).sum()
    loss.backward()
    norm = updater_of(optimizer, recipe).step(loss.detach(), Alone(model), want_norm=False)
    assert norm.item() == pytest.approx(5)
    assert (before - model.weight).norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_fp16_skips_one_overflow_and_goes_on(name):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    recipe = load(None, "precision=fp16", "optimizer.lr=1", "optimizer.momentum=0", f"optimizer.name={name}")
    optimizer = build_optimizer(dict(model.named_parameters()), recipe.optimizer, roles_of(model, recipe))
    updater, strategy = updater_of(optimizer, recipe), Alone(model)
    before = model[0].weight.detach().clone()
    moved = []
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        (updater.scaler.scale(loss) * factor).backward()
        updater.step(loss.detach(), strategy, want_norm=False)
        moved.append(not torch.equal(model[0].weight, before))
    assert moved == [False, True] and updater.bad.item() == 0
    assert updater.state()["scale"].item() == 2.0**15, "halved once"


def test_a_stage_in_which_nothing_trains_hears_of_the_others_overflow_in_fp16():
    class Elsewhere(Alone):
        def reduce_overflow(self, flag):
            flag.fill_(1)

    recipe = load(None, "precision=fp16")
    updater = updater_of(build_optimizer({}, recipe.optimizer), recipe)
    updater.step(torch.zeros(()), Elsewhere(nn.Identity()), want_norm=False)
    assert updater.state()["scale"].item() == 2.0**15, "halved, as on the ranks that have gradients"


def test_fp16_that_never_becomes_finite_is_bad():
    model = nn.Linear(2, 1, bias=False)
    recipe = load(None, "precision=fp16")
    optimizer = build_optimizer(dict(model.named_parameters()), recipe.optimizer)
    updater, strategy = updater_of(optimizer, recipe), Alone(model)
    verdicts = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        (updater.scaler.scale(loss) * math.inf).backward()
        updater.step(loss.detach(), strategy, want_norm=False)
        verdicts.append(updater.is_bad())
    assert not any(verdicts[:20]) and verdicts[-1]


def test_optimizer_state_travels_by_name():
    model = nn.Linear(2, 2)
    named = dict(model.named_parameters())
    recipe = load(None).optimizer
    optimizer = build_optimizer(named, recipe)
    optimizer.state[model.bias]["momentum_buffer"].fill_(3)
    saved = {key: value.clone() for key, value in optimizer_state(optimizer, named).items()}
    assert set(saved) == {"weight//momentum_buffer", "bias//momentum_buffer"}
    reordered = {"bias": model.bias, "weight": model.weight}
    fresh = build_optimizer(reordered, recipe)
    strategy = Alone(model)
    strategy.scatter(whole(saved), optimizer_state(fresh, reordered))
    assert fresh.state[model.bias]["momentum_buffer"].tolist() == [3, 3]
    other = build_optimizer(named, load(None, "optimizer.name=adam").optimizer)
    with pytest.raises(ValueError, match=r"weight//step .*\(\)$"):
        strategy.scatter(whole(saved), optimizer_state(other, named))


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
    assert average.tensors()["w"].item() == pytest.approx(expected) and average.tensors()["count"].item() == 3


def test_the_model_computes_with_its_averages_inside_a_block_and_with_its_weights_after_it():
    strategy = mode_of(load(None, "mode=single", "channels_last=false"), ALONE, (2, 3), classes=2)
    strategy.setup(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    live = {**strategy.named_parameters(), **strategy.named_buffers()}
    averages = MovingAverage(live, decay=0.5).tensors()
    averages["0.weight"].fill_(2.0)
    averages["1.running_mean"].fill_(1.0)
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    strategy.train(False)
    with strategy.weights(averages):
        inside = strategy.forward(torch.ones(2, 3))
        assert live["0.weight"].unique().tolist() == [2.0] and live["1.running_mean"].tolist() == [1.0, 1.0]
    torch.testing.assert_close(live, before, rtol=0, atol=0)
    assert averages["0.weight"].unique().tolist() == [2.0], "and the averages are what they were"
    assert not inside.equal(strategy.forward(torch.ones(2, 3)))
    with strategy.weights({}):
        torch.testing.assert_close(live, before, rtol=0, atol=0)

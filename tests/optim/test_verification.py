"""Rows of the table against steps of the classes, and classes that the user registers."""

import pytest
import torch
from torch import nn

from tests.optim.rows import NAMES
from trainer.errors import RecipeError
from trainer.optim.classes import OWN_CLASSES, create_optimizer, register_optimizer
from trainer.optim.optimizers import build_optimizer
from trainer.optim.verification import find_traits, verify
from trainer.recipe import load
from trainer.recipe.optimizer_table import OPTIMIZERS, REFUSED

# LARS adapts the rate only of what decays.
WORDS = ("optimizer.lr=0.01", "optimizer.weight_decay=0.1")
ELEMENTWISE = [param for param in NAMES if not OPTIMIZERS[param.values[0]].matrix_state]


@pytest.fixture
def registered():
    """Forget the optimizers that a test registers."""
    before = {*OPTIMIZERS}
    yield
    for name in {*OPTIMIZERS} - before:
        del OPTIMIZERS[name]
        del OWN_CLASSES[name]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_row_is_what_its_steps_show(name):
    row = OPTIMIZERS[name]
    found = verify(load(None, f"optimizer.name={name}", *WORDS).optimizer)
    assert (found.state, found.whole, found.joint) == (row.state, row.whole, row.joint)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_and_state_are_those_of_the_class_itself(name):
    """A plain loop has the class of torch or timm, and its state from the first step."""
    recipe = load(None, f"optimizer.name={name}", *WORDS).optimizer
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)))
    ours, plain = models
    optimizer = build_optimizer(dict(ours.named_parameters()), recipe)
    groups = [{"params": [*plain.parameters()], "weight_decay": 0.1, "rate": 1.0}]
    reference = create_optimizer(recipe, groups)
    for step in range(5):
        images = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(step))
        for model, stepper in ((ours, optimizer), (plain, reference)):
            model.zero_grad()
            model(images).square().sum().backward()
            stepper.found_inf = torch.zeros(())
            if stepper is reference:
                del stepper.found_inf
            stepper.step()
    close = {"rtol": 1e-5, "atol": 1e-7} if OPTIMIZERS[name].fused else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), **close)
    for p, twin in zip(ours.parameters(), plain.parameters(), strict=True):
        state = {key: optimizer.state[p][key] for key in reference.state[twin]}
        torch.testing.assert_close(state, dict(reference.state[twin]), **close)


def test_arguments_reach_the_class_and_their_state_is_known():
    recipe = load(None, "optimizer.name=adamw", "optimizer.args.amsgrad=true").optimizer
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(dict(model.named_parameters()), recipe)
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert "max_exp_avg_sq" in optimizer.state[model.weight]


@pytest.mark.parametrize(
    "words",
    [
        "optimizer.name=adam optimizer.args.lr=0.1",
        "optimizer.name=adam optimizer.args.betas=[0.9,0.99]",
        "optimizer.name=adam optimizer.args.amsgrda=true",
        "optimizer.name=adam optimizer.args.amsgrad=1",
        "optimizer.name=adagrad optimizer.args.lr_decay=fast",
        # Its first momentum is the gradient, not a share of it.
        "optimizer.name=sgd optimizer.args.dampening=0.5",
        "optimizer.name=rmsprop optimizer.args.alpha=-1",
    ],
)
def test_arguments_that_a_run_cannot_use(words):
    with pytest.raises(RecipeError, match=r"optimizer\.args"):
        build_optimizer({"w": nn.Parameter(torch.ones(3))}, load(None, *words.split()).optimizer)


def test_a_refused_optimizer_is_none_of_the_table():
    assert not {*REFUSED} & {*OPTIMIZERS}


class Signed(torch.optim.Optimizer):
    """Steps of the sign of the momentum, as a user would write them."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group)

    def move(self, p, group):
        state = self.state[p]
        if not state:
            state["count"] = torch.zeros(())
            state["buffer"] = torch.zeros_like(p)
        state["count"] += 1
        state["buffer"].lerp_(p.grad, 1 - group["beta"])
        p.sub_(state["buffer"].sign() * group["lr"] / state["count"].sqrt())


class CountsInPython(Signed):
    def move(self, p, group):
        self.number = getattr(self, "number", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / self.number)


class IgnoresRate(Signed):
    def move(self, p, group):
        p.sub_(p.grad, alpha=0.1)


class Replaces(Signed):
    def move(self, p, group):
        p.data = p.data - group["lr"] * p.grad


class Starts(Signed):
    def move(self, p, group):
        state = self.state[p]
        state.setdefault("scale", torch.ones_like(p))
        p.sub_(p.grad * state["scale"], alpha=group["lr"])


class Normed(Signed):
    def move(self, p, group):
        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Joint(Signed):
    def move(self, p, group):
        total = sum(q.grad.abs().sum() for q in group["params"])
        p.sub_(p.grad / total, alpha=group["lr"])


@pytest.mark.parametrize("own_class", [CountsInPython, IgnoresRate, Replaces, Starts])
def test_a_class_that_could_not_be_resumed_is_refused(own_class, registered):
    register_optimizer(own_class.__name__)(own_class)
    with pytest.raises(RecipeError, match=own_class.__name__):
        find_traits(load(None, f"optimizer.name={own_class.__name__}").optimizer)


def test_what_a_class_depends_on_is_found(registered):
    for own_class in (Signed, Normed, Joint):
        register_optimizer(own_class.__name__)(own_class)
    rows = {}
    for name in ("Signed", "Normed", "Joint"):
        rows[name] = find_traits(load(None, f"optimizer.name={name}").optimizer)
    assert {*rows["Signed"].state} == {"count", "buffer"}
    assert (rows["Signed"].whole, rows["Signed"].joint) == (False, False)
    assert (rows["Normed"].whole, rows["Normed"].joint) == (True, False)
    assert rows["Joint"].joint
    with pytest.raises(RecipeError, match="weight_decay"):
        find_traits(load(None, "optimizer.name=Signed", "optimizer.weight_decay=0.1").optimizer)
    with pytest.raises(RecipeError, match="taken"):
        register_optimizer("Signed")
    with pytest.raises(RecipeError, match="Linear"):
        register_optimizer("other")(nn.Linear)

"""Programs that train differently are reported with their difference; the same program is left
unchanged.
"""

import contextlib
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from trainer.errors import RecipeError
from trainer.models.equivalence import TOLERANCE, check_equivalent, list_changing_state, observe


class Net(nn.Module):
    """Two layers, with something in between."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.count = 0
        self.last = None
        self.table, self.array, self.figures = torch.zeros(2), np.zeros(2), {"n": 0, "mean": 0.0}
        self.mask = torch.zeros(1, 4).expand(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


def inputs():
    return torch.randn(
        2,
        5,
        3,
        generator=torch.Generator().manual_seed(1),
    ).unbind()


def passes(model, run=None, pieces=None):
    return observe(model, model.train, run or model, pieces or inputs())


def without_gradient(model, x):
    with torch.no_grad():
        hidden = model.a(x)
    return model.b(torch.tanh(model.norm(hidden)))


def after(change):
    """The model's own pass, after something that is not."""

    def run(model, x):
        change(model, x)
        return model(x)

    return run


changed_buffer = after(lambda model, x: model.kept.add_(1))
makes_a_counter = after(
    lambda model, x: setattr(
        model,
        "made",
        getattr(model, "made", 0) + 1,
    )
)
changed_weight = after(lambda model, x: model.a.weight.data.mul_(1.0001))
frozen_norm = after(lambda model, x: model.norm.eval())


def adds_to(name, values=vars):
    """Return a layer that adds to one of the values, which are attributes of the model or its
    metadata.
    """

    def add(model, x):
        values(model)[name] += 1

    return after(add)


counts_in = adds_to("n", lambda model: model.figures)


@after
def remembers(model, x):
    """Layers that remember something of this pass alone."""
    model.last, model.figures["mean"] = x.detach() * 2, x.mean().item()


def scaled_gradient(model, x):
    hidden = model.a(x)
    hidden.register_hook(lambda gradient: gradient * 0.3)
    return model.b(torch.tanh(model.norm(hidden)))


def later(model, x):
    """Only the second pass is another."""
    seen = vars(model).setdefault("passed", [])
    seen.append(1)
    return model(x) * (1.1 if len(seen) == 2 else 1.0)


def in_bf16(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


OTHERS = {
    "gradient of a.weight": without_gradient,
    "buffer kept": changed_buffer,
    "attribute count": adds_to("count"),
    "attribute made": makes_a_counter,
    r"attribute figures\[0\]": counts_in,
    "attribute table": adds_to("table"),
    "attribute array": adds_to("array"),
    "change of a.weight": changed_weight,
    "state of NumPy": after(lambda *_: np.random.rand()),
    "state of Python": after(lambda *_: random.random()),
    "state of torch": after(lambda *_: torch.rand(1)),
    "gradient of a.weight .0.7 of": scaled_gradient,
    "buffer norm.": frozen_norm,
    "passed": later,
    "buffer norm.running_mean": in_bf16,
}


@pytest.mark.parametrize("what", OTHERS)
def test_differences_are_named(what):
    torch.manual_seed(0)
    model = Net()
    with pytest.raises(RecipeError, match=f"{what}.*mode=ddp") as caught:
        check_equivalent(
            "stages",
            passes(model),
            passes(model, partial(OTHERS[what], model)),
            TOLERANCE["fp32"],
        )
    assert "\n" not in str(caught.value)


def test_each_of_them_alone_is_seen():
    """A comparison without one of its parts fails here: each of these differs in one part alone."""
    model = Net()
    whole = passes(model)
    first, second, third = whole.tensors
    changes = {
        "tensors buffer": [first, second, {**third, "buffer kept": torch.ones(2)}],
        "tensors weight": [first, {**second, "change of b.bias": torch.ones(2)}, third],
        "tensors output": [first, second, {**third, "output": third["output"] * 1.001}],
        "plain attribute": [
            {**names, "attribute count": str(n)} for n, names in enumerate(whole.plain)
        ],
        "plain random": [
            {**names, "random state of NumPy": n} for n, names in enumerate(whole.plain)
        ],
    }
    for name, gradient in whole.gradients.items():
        changes |= {f"gradients {name}": {**whole.gradients, name: None}}
        changes |= {f"gradients {name} 2": {**whole.gradients, name: gradient * 1.001 + 1e-3}}
    for part, value in changes.items():
        with pytest.raises(RecipeError):
            check_equivalent(
                "stages",
                whole,
                whole._replace(**{part.split()[0]: value}),
                TOLERANCE["fp32"],
            )


def test_the_same_program_is_the_same_and_nothing_is_left():
    torch.manual_seed(0)
    model = nn.Sequential(Net(), nn.Dropout(), nn.BatchNorm1d(2))
    model[0].a.weight.grad = torch.ones(4, 3)
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        check_equivalent("stages", passes(model), passes(model), TOLERANCE[precision])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].a.weight.grad, torch.ones(4, 3))
    assert model[0].b.weight.grad is None
    assert model.training and not model[2].training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("run", [makes_a_counter, counts_in, adds_to("table"), remembers])
def test_two_that_count_alike_are_the_same(run):
    model = Net()
    one, other = (passes(model, partial(run, model)) for _ in range(2))
    check_equivalent("stages", one, other, TOLERANCE["fp32"])
    check_equivalent(
        "stages", passes(model), passes(model, partial(remembers, model)), TOLERANCE["fp32"]
    )
    assert not hasattr(model, "made")
    assert model.last is None
    assert model.figures == {"n": 0, "mean": 0.0}


def test_another_order_of_sums_and_values_that_are_no_numbers_are_no_difference():
    torch.manual_seed(0)
    model = Net()
    whole = passes(model)
    for factor, same in ((1 + 1e-6, True), (1 + 1e-4, False)):
        nearly = whole._replace(
            gradients={name: value * factor for name, value in whole.gradients.items()}
        )
        with contextlib.nullcontext() if same else pytest.raises(RecipeError):
            check_equivalent("stages", whole, nearly, TOLERANCE["fp32"])
    endless, again = (
        passes(model, lambda x: model(x) * torch.tensor([float("nan"), float("inf")]))
        for _ in range(2)
    )
    check_equivalent("stages", endless, again, TOLERANCE["fp32"])


def test_state_that_each_pass_changes_is_named():
    model = Net()
    model.norm = nn.LayerNorm(4)
    assert list_changing_state(passes(model)) == []
    runs = {
        "buffer kept": changed_buffer,
        "attribute made": makes_a_counter,
        "attribute figures[0]": counts_in,
    }
    runs |= {f"attribute {name}": adds_to(name) for name in ("count", "table", "array")}
    for name, run in runs.items():
        assert list_changing_state(passes(model, partial(run, model))) == [name]
    assert not model.table.any() and not model.array.any()
    # The next pass may read it: a figure that is stored looks like a temperature that is annealed.
    assert list_changing_state(passes(model, partial(remembers, model))) == ["attribute figures[1]"]
    before = model.a.weight.clone()
    assert list_changing_state(passes(model, partial(changed_weight, model))) == [
        "change of a.weight"
    ]
    assert torch.equal(model.a.weight, before)

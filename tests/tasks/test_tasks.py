"""Losses, sums and metrics of the shipped tasks, compared with other computations.

scikit-learn sets OpenMP's variables as it is imported: inside a test, which puts them back.
"""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer import tasks
from trainer.errors import RecipeError
from trainer.recipe import known_names, load
from trainer.tasks import Classification, Multilabel, Regression, Task, register_task

NAMES = ("a", "b", "c")


def task(*words, names=NAMES):
    return tasks.create_task(load(None, *words), names)


def numbers(*shape):
    return torch.randn(
        *shape,
        generator=torch.Generator().manual_seed(len(shape) + shape[0]),
    )


def of_parts(made, outputs, targets):
    """Return the metrics from the sums of parts of four samples, and of the rest."""
    sums = {}
    for some, expected in zip(outputs.split(4), targets.split(4), strict=True):
        for name, part in made.sums(some, expected).items():
            sums[name] = sums.get(name, 0) + part.double()
    return made.metrics(sums, len(outputs))


def test_validation_metrics_are_neither_smoothed_nor_weighted():
    """Losses of training are held against a plain loop in test_ground_truth."""
    outputs = numbers(12, 3)
    targets = torch.arange(12) % 3
    built_task = task("loss.label_smoothing=0.1", "loss.class_weights=[0.5,2,1]")
    expected = cross_entropy(outputs, targets, reduction="sum").item()
    assert built_task.sums(outputs, targets)["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert built_task.weights(torch.device("meta")).device.type == "meta", (
        "and weights follow the outputs"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["loss.class_weights=[1,2]"],
            r"loss\.class_weights .*\b2 numbers.*\b3 classes \(a, b, c\)",
        ),
        (["loss.class_weights=balanced"], r"class_weights=balanced .*class_weights=\[1,2,\.\.\.\]"),
        (
            ["task.name=regression", "augment.mixup=0.2"],
            r"mixup=0\.2 .*task\.name=regression .*mixup=0$",
        ),
        (
            ["task.name=regression", "model.num_classes=5"],
            r"model\.num_classes=5\b.*\b3 values\b",
        ),
        (["task.name=clasification"], r"task\.name=clasification .*: classification, "),
    ],
)
def test_missing_features_of_a_task_are_refused(words, says):
    with pytest.raises(RecipeError, match=says):
        task(*words)


@pytest.mark.parametrize(
    ("value", "count"), [(3.0, 4), (3.3, 7), (1.72, 4000), (37.2, 4000), (1e6 + 0.7, 2000)]
)
def test_values_that_are_all_the_same_have_nothing_to_explain(value, count):
    built_task = task("task.name=regression", names=("x",))
    targets = torch.full((count, 1), value)
    assert np.isnan(of_parts(built_task, targets + 1, targets)["r2"])


def test_the_names_that_are_known_without_torch():
    assert {*known_names.TASKS} <= {*tasks.task._registered}
    assert all(
        tasks.find_task_class(load(None, f"task.name={name}")).__module__.startswith("trainer.")
        for name in known_names.TASKS
    )


# Targets.


@pytest.mark.parametrize(
    ("kind", "targets", "says"),
    [
        (
            Classification,
            torch.tensor([0, 3]),
            r"\b0 to 2, .*\b3 class names, .*\b0 to 3$",
        ),
        (
            Classification,
            torch.tensor([0.5]),
            r"whole numbers, .*float32 \(1,\)",
        ),
        (Multilabel, torch.zeros(2, 4), r"\b3 class names, .*float32 \(2, 4\)"),
        (Multilabel, torch.full((2, 3), 0.5), r"\b0 or 1, .*\b0\.5 to 0\.5$"),
        (
            Regression,
            torch.arange(4),
            r"data\.labels=FILE\.csv, .*\b3 names .*int64 \(4, 1\)",
        ),
        (Regression, torch.zeros(4, 2), r"data\.labels=FILE\.csv, .*\b3 names .*float32 \(4, 2\)"),
        (Regression, torch.tensor([[1.0, 2.0, torch.nan]]), "finite"),
    ],
)
def test_targets_that_are_none(kind, targets, says):
    with pytest.raises(ValueError, match=says):
        kind.checked(targets, NAMES)


def test_targets_become_what_the_loss_wants():
    assert (
        Classification.checked(torch.tensor([0, 2], dtype=torch.uint8), NAMES).dtype == torch.int64
    )
    assert Multilabel.checked(torch.tensor([1, 0]), NAMES).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Multilabel.checked(torch.tensor([[True, False, True]]), NAMES).tolist() == [[1, 0, 1]]
    assert Regression.checked(torch.tensor([1, 2]), ("x",)).tolist() == [[1.0], [2.0]]
    for kind in (Classification, Multilabel):
        twice = kind.checked(torch.tensor([0, 2]), NAMES)
        assert kind.checked(twice, NAMES).equal(twice)


def test_a_users_task_needs_a_loss_only(monkeypatch):
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))

    @register_task("absolute")
    class Absolute(Task):
        def loss(self, outputs, targets):
            return (outputs - targets).abs().mean()

    built_task = task("task.name=absolute")
    outputs = numbers(10, 2, 2)
    targets = numbers(11, 2, 2)[:10]
    actual = of_parts(built_task, outputs, targets)
    assert actual == {"loss": pytest.approx((outputs - targets).abs().mean().item())}
    assert (
        built_task.metric == "loss"
        and built_task.improves(1.0, 2.0)
        and built_task.outputs() is None
    )
    assert built_task.text(actual) == f"loss {actual['loss']:.4f}"
    with pytest.raises(RecipeError, match=r"'absolute'.*taken"):
        register_task("absolute")


def test_a_users_loss_refuses_options_that_it_ignores(monkeypatch):
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))

    @register_task("focal")
    class Focal(Classification):
        def loss(self, outputs, targets):
            each = cross_entropy(outputs, targets, reduction="none")
            return ((1 - (-each).exp()) ** 2 * each).mean()

    @register_task("smoothed")
    class Smoothed(Focal):
        uses = ("label_smoothing",)

        def loss(self, outputs, targets):
            return super().loss(outputs, targets)

    assert task("task.name=focal").metric_names() == ("loss", "top1", "top5")
    keys = ("label_smoothing", "class_weights")
    assert [Focal.uses_key(key) for key in keys] == [False, False]
    assert [Smoothed.uses_key(key) for key in keys] == [True, False]


def test_predictions_are_of_names_only():
    outputs = torch.tensor([[0.0, 2.0, -1.0, 9.0, 9.0]])
    places, numbers = task("task.name=multilabel", "model.num_classes=5").ranked(outputs)
    assert places.tolist() == [[1, 0, 2]]
    assert numbers[0, 0].item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item())
    names = [str(n) for n in range(8)]
    places, numbers = task("task.name=regression", names=names).ranked(torch.arange(8.0)[None])
    assert places.tolist() == [list(range(8))]
    assert numbers.tolist() == [list(range(8))]


def test_the_probabilities_of_views_are_averaged():
    """Also those of 0 and 1; a regression has none."""
    first = [[0.0, 1.0], [200.0, -200.0]]
    second = [[2.0, -1.0], [200.0, -200.0]]
    views = torch.tensor([first, second])
    recipe = load(None, "predict.tta=flip")
    for kind, convert in (
        (Classification, lambda rows: rows.softmax(-1)),
        (Multilabel, torch.sigmoid),
    ):
        task = kind(recipe, ("a", "b"))
        actual = task.to_probabilities(task.average(views))
        torch.testing.assert_close(
            actual,
            (convert(views[0]) + convert(views[1])) / 2,
        )
    with pytest.raises(RecipeError, match=r"^predict\.tta\b.*\bleave it out$"):
        Regression(recipe, ("a", "b")).average(views)

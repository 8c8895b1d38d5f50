"""Losses, sums and metrics of the shipped tasks, held against other ways of computing them.

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
    return tasks.create(load(None, *words), names)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def of_parts(made, outputs, targets):
    """Metrics from the sums of parts of four rows, and of the rest."""
    sums = {}
    for some, wanted in zip(outputs.split(4), targets.split(4), strict=True):
        for name, part in made.sums(some, wanted).items():
            sums[name] = sums.get(name, 0) + part.double()
    return made.metrics(sums, len(outputs))


def test_what_is_told_of_held_out_images_is_neither_smoothed_nor_weighted():
    """Losses of training are held against a plain loop in test_ground_truth."""
    outputs, targets = numbers(12, 3), torch.arange(12) % 3
    made = task("loss.label_smoothing=0.1", "loss.class_weights=[0.5,2,1]")
    expected = cross_entropy(outputs, targets, reduction="sum").item()
    assert made.sums(outputs, targets)["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert made.weights(torch.device("meta")).device.type == "meta", "and weights follow the outputs"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["loss.class_weights=[1,2]"], r"class_weights has 2 numbers, and the data 3 classes \(a, b, c\)"),
        (["loss.class_weights=balanced"], "known only with its items: give the weights"),
        (["task.name=multilabel", "loss.label_smoothing=0.1"], "task.name=multilabel: set loss.label_smoothing=0"),
        (["task.name=regression", "loss.class_weights=[1,2,3]"], "task.name=regression: set loss.class_weights=null"),
        (["task.name=regression", "augment.mixup=0.2"], "do not mix: set augment.mixup=0"),
        (["task.name=regression", "model.num_classes=5"], "there are 3 values to predict: leave it out"),
        (["task.name=clasification"], "is not a task; known: classification, "),
    ],
)
def test_what_a_task_does_not_have(words, says):
    with pytest.raises(RecipeError, match=says):
        task(*words)


@pytest.mark.parametrize(("value", "count"), [(3.0, 4), (3.3, 7), (1.72, 4000), (37.2, 4000), (1e6 + 0.7, 2000)])
def test_values_that_are_all_the_same_have_nothing_to_explain(value, count):
    made = task("task.name=regression", names=("x",))
    targets = torch.full((count, 1), value)
    assert np.isnan(of_parts(made, targets + 1, targets)["r2"])


def test_the_names_that_are_known_without_torch():
    assert {*known_names.TASKS} <= {*tasks.task._registered}
    assert all(
        tasks.kind(load(None, f"task.name={name}")).__module__.startswith("trainer.") for name in known_names.TASKS
    )


# Targets.


@pytest.mark.parametrize(
    ("kind", "targets", "says"),
    [
        (Classification, torch.tensor([0, 3]), "must be 0 to 2, one for each of the 3 class names, found 0 to 3"),
        (Classification, torch.tensor([0.5]), r"whole numbers, one for each sample, found float32 \(1,\)"),
        (Multilabel, torch.zeros(2, 4), r"each of the 3 class names, found float32 \(2, 4\)"),
        (Multilabel, torch.full((2, 3), 0.5), "labels must be 0 or 1, found 0.5 to 0.5"),
        (Regression, torch.arange(4), r"data.labels=FILE.csv, .*each of the 3 names of values, found int64 \(4, 1\)"),
        (Regression, torch.zeros(4, 2), r"3 names of values, found float32 \(4, 2\)"),
        (Regression, torch.tensor([[1.0, 2.0, torch.nan]]), "finite"),
    ],
)
def test_targets_that_are_none(kind, targets, says):
    with pytest.raises(ValueError, match=says):
        kind.checked(targets, NAMES)


def test_targets_become_what_the_loss_wants():
    assert Classification.checked(torch.tensor([0, 2], dtype=torch.uint8), NAMES).dtype == torch.int64
    assert Multilabel.checked(torch.tensor([1, 0]), NAMES).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Multilabel.checked(torch.tensor([[True, False, True]]), NAMES).tolist() == [[1, 0, 1]]
    assert Regression.checked(torch.tensor([1, 2]), ("x",)).tolist() == [[1.0], [2.0]]
    for kind in (Classification, Multilabel):
        twice = kind.checked(torch.tensor([0, 2]), NAMES)
        assert kind.checked(twice, NAMES).equal(twice)


def test_a_task_of_ones_own_needs_a_loss_only(monkeypatch):
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))

    @register_task("absolute")
    class Absolute(Task):
        def loss(self, outputs, targets):
            return (outputs - targets).abs().mean()

    made = task("task.name=absolute")
    outputs, targets = numbers(10, 2, 2), numbers(11, 2, 2)[:10]
    found = of_parts(made, outputs, targets)
    assert found == {"loss": pytest.approx((outputs - targets).abs().mean().item())}
    assert made.metric == "loss" and made.improves(1.0, 2.0) and made.outputs() is None
    assert made.text(found) == f"loss {found['loss']:.4f}"
    with pytest.raises(RecipeError, match=r"'absolute'.*taken"):
        register_task("absolute")


def test_a_loss_of_ones_own_refuses_what_it_does_not_look_at(monkeypatch):
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
    with pytest.raises(RecipeError, match=r"task\.name=focal.*loss\.label_smoothing=0"):
        task("task.name=focal", "loss.label_smoothing=0.1")
    assert task("task.name=smoothed", "loss.label_smoothing=0.1")
    with pytest.raises(RecipeError, match=r"task\.name=smoothed.*loss\.class_weights=null"):
        task("task.name=smoothed", "loss.class_weights=[1,2,3]")


def test_predictions_are_of_names_only():
    outputs = torch.tensor([[0.0, 2.0, -1.0, 9.0, 9.0]])
    places, numbers = task("task.name=multilabel", "model.num_classes=5").ranked(outputs)
    assert places.tolist() == [[1, 0, 2]] and numbers[0, 0].item() == pytest.approx(
        torch.sigmoid(torch.tensor(2.0)).item()
    )
    names = [str(n) for n in range(8)]
    places, numbers = task("task.name=regression", names=names).ranked(torch.arange(8.0)[None])
    assert places.tolist() == [list(range(8))] and numbers.tolist() == [list(range(8))]

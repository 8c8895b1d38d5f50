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


def task(*words, targets=None, names=NAMES):
    return tasks.create(load(None, *words), names, targets)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def of_parts(made, outputs, targets, rows=None):
    """Metrics from the sums of uneven parts, or of parts of so many rows."""
    sums = {}
    starts = range(rows, len(outputs), rows) if rows else (3, 4)
    for some, wanted in zip(outputs.tensor_split([*starts]), targets.tensor_split([*starts]), strict=True):
        for name, part in made.sums(some, wanted).items():
            sums[name] = sums.get(name, 0) + part.double()
    return made.metrics(sums, len(outputs))


# Classification.


def test_the_loss_is_torchs_cross_entropy():
    outputs, targets = numbers(12, 3), torch.arange(12) % 3
    assert task().loss(outputs, targets).equal(cross_entropy(outputs, targets))
    smoothed = task("loss.label_smoothing=0.1").loss(outputs, targets)
    assert smoothed.equal(cross_entropy(outputs, targets, label_smoothing=0.1))
    soft = outputs.softmax(1)
    assert task().loss(outputs, soft).equal(cross_entropy(outputs, soft))
    assert task("loss.label_smoothing=0.1").sums(outputs, targets)["loss"] == pytest.approx(
        cross_entropy(outputs, targets, reduction="sum").item()
    ), "what is told of held-out images is not smoothed"


@pytest.mark.parametrize("given", ["balanced", "[0.5,2,1]"])
def test_weighted_losses_of_parts_add_up_to_that_of_the_whole(given):
    """torch's own, the mean over the weights, does not: a part's weights are not those of another."""
    outputs, targets = numbers(12, 3), torch.tensor([0] * 7 + [1] * 4 + [2])
    made = task(f"loss.class_weights={given}", targets=targets)
    weights = [0.5, 2.0, 1.0]
    if given == "balanced":
        from sklearn.utils.class_weight import compute_class_weight

        weights = compute_class_weight("balanced", classes=np.arange(3), y=targets.numpy()).tolist()
    each = cross_entropy(outputs, targets, reduction="none")
    expected = (each * torch.tensor(weights)[targets].float()).mean()
    assert made.loss(outputs, targets).item() == pytest.approx(expected.item())
    parts = [(outputs[rows], targets[rows]) for rows in (slice(0, 6), slice(6, 8), slice(8, 12))]
    assert sum(made.loss(*part) * len(part[0]) for part in parts) / 12 == pytest.approx(expected.item())
    soft = torch.nn.functional.one_hot(targets, 3).float()
    assert made.loss(outputs, soft).item() == pytest.approx(expected.item()), "as shares under mixup"
    assert made.sums(outputs, targets)["loss"].item() == pytest.approx(each.sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "targets", "says"),
    [
        (["loss.class_weights=[1,2]"], None, r"class_weights has 2 numbers, and the data 3 classes \(a, b, c\)"),
        (["loss.class_weights=balanced"], None, "known only with its items: give the weights"),
        (
            ["task.name=multilabel", "loss.label_smoothing=0.1"],
            None,
            "task.name=multilabel: set loss.label_smoothing=0",
        ),
        (
            ["task.name=regression", "loss.class_weights=[1,2,3]"],
            None,
            "task.name=regression: set loss.class_weights=null",
        ),
        (["task.name=regression", "augment.mixup=0.2"], None, "do not mix: set augment.mixup=0"),
        (["task.name=regression", "model.num_classes=5"], None, "there are 3 values to predict: leave it out"),
        (["task.name=clasification"], None, "is not a task; known: classification, "),
    ],
)
def test_what_a_task_does_not_have(words, targets, says):
    with pytest.raises(RecipeError, match=says):
        task(*words, targets=targets)


# Multilabel.


def test_balanced_labels_count_as_much_as_their_absence():
    targets = torch.tensor([[1.0, 0, 0]] * 1 + [[0.0, 1, 0]] * 3)
    made = task("task.name=multilabel", "loss.class_weights=balanced", targets=targets)
    assert made.weights(torch.device("cpu")).tolist() == pytest.approx([3, 1 / 3, 1])
    assert made.weights(torch.device("meta")).device.type == "meta", "and follow the outputs"


# Regression.


@pytest.mark.parametrize(("value", "count"), [(3.0, 4), (3.3, 7), (1.72, 4000), (37.2, 4000), (1e6 + 0.7, 2000)])
def test_values_that_are_all_the_same_have_nothing_to_explain(value, count):
    made = task("task.name=regression", names=("x",))
    targets = torch.full((count, 1), value)
    assert np.isnan(of_parts(made, targets + 1, targets, 4)["r2"])


def test_the_names_that_are_known_without_torch():
    assert {*known_names.TASKS} <= {*tasks.task._registered}
    assert all(
        tasks.kind(load(None, f"task.name={name}")).__module__.startswith("trainer.") for name in known_names.TASKS
    )


# Targets.


@pytest.mark.parametrize(
    ("kind", "targets", "says"),
    [
        (
            Classification,
            torch.tensor([0, 3]),
            r"labels must be 0 to 2, one for each of the 3 class names, found 0 to 3",
        ),
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
    outputs, targets = numbers(8, 2, 2), numbers(9, 2, 2)[:8]
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

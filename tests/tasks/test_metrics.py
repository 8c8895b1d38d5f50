"""Metrics by name, compared with scikit-learn's, and their choice by task.metric and task.metrics.

scikit-learn sets OpenMP's variables as it is imported: inside a test, which puts them back.
"""

import copy
import math

import numpy as np
import pytest
import torch

from tests.command_line import QUIET, ok, result, rows, trainer
from tests.models.families import Recording
from tests.tasks.evaluated_runs import Rounded, train_and_evaluate
from trainer import tasks
from trainer.errors import RecipeError
from trainer.recipe import load, metric_table
from trainer.recipe.metric_table import METRICS
from trainer.tasks import metrics
from trainer.tasks.metrics import (
    FUNCTIONS,
    MetricInputs,
    compute_auroc,
    compute_average_precision,
    tabulate_classes,
)

AVERAGES = ("macro", "weighted")


def rank_scores(labels, scores):
    """Return scikit-learn's AUROC and average precision of each class; NaN if undefined."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    aurocs = []
    precisions = []
    for column, score in zip(labels.T, scores.T, strict=True):
        has_both = 0 < column.sum() < len(column)
        aurocs.append(roc_auc_score(column, score) if has_both else math.nan)
        precisions.append(average_precision_score(column, score) if column.any() else math.nan)
    return {"auroc": aurocs, "average_precision": precisions}


def average_classes(labels, predicted):
    from sklearn.metrics import precision_recall_fscore_support

    expected = {}
    for average in AVERAGES:
        values = precision_recall_fscore_support(
            labels, predicted, average=average, zero_division=0
        )
        for name, value in zip(("precision", "recall", "f1"), values[:3], strict=True):
            expected[f"{name}_{average}"] = value
    return expected


def calibration_error(probabilities, labels):
    """Guo et al., equations 3 to 5, bin by bin."""
    confidence = probabilities.max(1)
    is_hit = probabilities.argmax(1) == labels
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gap = is_hit[inside].mean() - confidence[inside].mean()
            total += inside.mean() * abs(gap)
    return total


# Classes that occur, of seven.
PRESENT = [range(7), [1, 4, 6], [5]]


@pytest.mark.filterwarnings("ignore")  # of absent classes
@pytest.mark.parametrize("there", PRESENT, ids=["all classes", "some", "one"])
def test_metrics_of_one_class_are_scikit_learns(there, tmp_path):
    from sklearn.metrics import balanced_accuracy_score, matthews_corrcoef, top_k_accuracy_score

    draw = np.random.default_rng(6)
    targets = draw.choice(
        list(there), 75, p=np.arange(1, 1 + len(there)) / sum(range(len(there) + 1))
    )
    model = Rounded(7)
    with torch.no_grad():
        model.fc.weight[3] = model.fc.weight[0]  # so it is never predicted
    result, outputs = train_and_evaluate(
        "classification", targets, list("abcdefg"), tmp_path / "run", model
    )
    predicted = outputs.argmax(1)
    probabilities = torch.from_numpy(outputs).softmax(1).numpy()
    by_class = rank_scores(np.eye(7)[targets], probabilities)
    expected = {
        **average_classes(targets, predicted),
        **{name: np.nanmean(values) for name, values in by_class.items()},
        "balanced_accuracy": balanced_accuracy_score(targets, predicted),
        "mcc": matthews_corrcoef(targets, predicted),
        "ece": calibration_error(probabilities, targets),
    }
    for name, value in expected.items():
        ours = result[f"val_{name}"]
        assert ours == (None if math.isnan(value) else pytest.approx(value, rel=1e-6)), name
    apart = outputs - 1e-6 * np.arange(7)
    built = tasks.create_task(load(None, "task.metrics=[top2,top3]"), list("abcdefg"))
    sums = built.sums(torch.from_numpy(outputs).float(), torch.from_numpy(targets))
    ours = metrics.compute(("top2", "top3"), built.build_metric_inputs(sums, 75))
    for count in (2, 3):
        expected = top_k_accuracy_score(targets, apart, k=count, labels=range(7))
        assert ours[f"top{count}"] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore")
def test_metrics_of_labels_are_scikit_learns(tmp_path):
    """One label is on no image, one on all, and the last is never predicted."""
    from sklearn.metrics import matthews_corrcoef, precision_score, recall_score

    draw = np.random.default_rng(7)
    shares = [0.5, 0.2, 0, 1, 0.7, 0.4]
    targets = (draw.random((75, 6)) < shares).astype(np.float32)
    model = Rounded(6)
    with torch.no_grad():
        model.fc.weight[5] = 0
    result, outputs = train_and_evaluate(
        "multilabel", targets, list("abcdef"), tmp_path / "run", model
    )
    predicted = outputs > 0
    by_class = rank_scores(targets, outputs)
    expected = {
        **average_classes(targets, predicted),
        **{name: np.nanmean(values) for name, values in by_class.items()},
        "precision": precision_score(targets, predicted, average="micro"),
        "recall": recall_score(targets, predicted, average="micro"),
        "mcc": matthews_corrcoef(targets.ravel(), predicted.ravel()),
    }
    for name, value in expected.items():
        assert result[f"val_{name}"] == pytest.approx(value, rel=1e-6), name
    names = [name for name, row in METRICS.items() if "multilabel" in row.tasks]
    assert {f"val_{name}" for name in names} <= result.keys()


def test_the_error_of_a_regression_is_scikit_learns(tmp_path):
    from sklearn.metrics import root_mean_squared_error

    draw = np.random.default_rng(8)
    targets = draw.normal(1000, (1, 30), (75, 2)).astype(np.float32)
    result, outputs = train_and_evaluate(
        "regression", targets, ["a", "b"], tmp_path / "run", Recording(2)
    )
    expected = root_mean_squared_error(targets, outputs)
    assert result["val_rmse"] == pytest.approx(expected, rel=1e-5)


def test_ties_of_scores_count_as_in_scikit_learn():
    draw = np.random.default_rng(0)
    for count in range(2, 40):
        scores = draw.integers(0, draw.integers(1, 9), count).astype(float)
        labels = draw.random(count) < 0.4
        expected = rank_scores(labels[:, None], scores[:, None])
        for name, function in (
            ("auroc", compute_auroc),
            ("average_precision", compute_average_precision),
        ):
            ours = function(torch.from_numpy(scores), torch.from_numpy(labels))
            assert ours == pytest.approx(expected[name][0], rel=1e-12, nan_ok=True)
    undefined = torch.tensor([0.5, math.nan]), torch.tensor([True, False])
    assert math.isnan(compute_auroc(*undefined))
    assert math.isnan(compute_average_precision(*undefined))


def test_every_row_has_a_function_or_is_a_tasks_own():
    own_names = {name for kind in tasks.SHIPPED for name in kind.tells}
    assert METRICS.keys() == FUNCTIONS.keys() | own_names
    for kind in tasks.SHIPPED:
        assert {*kind.tells} <= kind.list_traits().keys()
        assert METRICS[kind.metric].larger_is_better == kind.larger_is_better


def build(*words, samples=100, names="abc"):
    return tasks.create_task(load(None, *words), list(names), None, samples)


def test_the_choice_of_metrics():
    plain = build()
    assert {"auroc", "ece", "f1_macro"} <= {*plain.measured} == plain.hidden
    assert build(samples=10**6).measured == tuple(
        name for name in plain.measured if not metric_table.needs_scores(name)
    )
    typed = build("task.metrics=[auroc,top2]", "task.metric=ece", samples=10**9)
    assert typed.measured == ("ece", "auroc", "top2")
    assert (typed.metric, typed.larger_is_better, typed.headline()) == ("ece", False, "ece")
    values = {"loss": 1.0, "top1": 0.5, "top5": 1.0}
    values |= {"ece": math.nan, "auroc": 0.75, "top2": 1.0}
    assert [*typed.shown(values).items()] == [
        ("loss", "1.0000"),
        ("ECE", "nan"),
        ("AUROC", "75.00%"),
        ("top-2", "100.00%"),
    ]
    assert typed.improves(0.1, 0.2) and not typed.improves(math.nan, None)
    assert build("task.metric=loss").improves(0.1, 0.2) and not plain.improves(0.1, 0.2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("task.metric=f1_makro", r"task\.metric=f1_makro .*f1_macro\?"),
        ("task.metrics=[auroc,f1]", r"task\.metrics=f1 .*known: loss, top1, .*f1_macro"),
        ("task.name=regression task.metric=top3", "task.metric=top3 .*known: loss, mae, "),
        ("task.name=multilabel task.metric=ece", "task.metric=ece .*task.name=multilabel"),
    ],
)
def test_other_metrics_are_refused_before_anything_starts(words, says, tmp_path):
    with pytest.raises(RecipeError, match=says):
        build(*words.split())
    done = trainer("recipe=digits", *words.split(), f"output={tmp_path / 'x'}")
    assert done.returncode == 2 and not (tmp_path / "x").exists()
    assert done.stderr.count("\n") == 1


PLUGIN = """
from sklearn.metrics import cohen_kappa_score
from trainer import Task, register_metric, register_task

@register_metric("kappa", larger_is_better=True)
def kappa(outputs, targets):
    return cohen_kappa_score(targets, outputs.argmax(1))

@register_metric("rarest", larger_is_better=False, needs="sums", is_fraction=True)
def rarest(sums, count):
    return sums["actual"].min() / count

@register_metric("broken", larger_is_better=True)
def broken(outputs, targets):
    return outputs[:, 99].mean()
"""


@pytest.mark.slow
def test_a_users_metric_decides(tmp_path):
    from sklearn.metrics import cohen_kappa_score

    (tmp_path / "own_metrics.py").write_text(PLUGIN)
    words = [
        "recipe=digits",
        "plugin=own_metrics",
        "model.name=mlp",
        "epochs=2",
        "threads=1",
        *QUIET,
    ]
    own = ["task.metric=kappa", "task.metrics=[rarest]"]
    folder = tmp_path / "run"
    lines = ok(*words, *own, "mode=ddp", "nproc=2", f"output={folder}", cwd=tmp_path).stdout
    head = next(line for line in lines.splitlines() if "val loss" in line)
    assert head.split()[:7] == ["epoch", "train", "loss", "val", "loss", "kappa", "rarest"]
    ours = result(folder)
    table = rows(folder / "epochs.csv")
    kappas = [float(row["val_kappa"]) for row in table]
    assert ours["best_kappa"] == max(kappas) and ours["best_epoch"] == 1 + np.argmax(kappas)
    assert [evaluation["kappa"] for evaluation in ours["validation"]] == kappas
    output = tmp_path / "labelled"
    ok("predict", folder, "predict.split=val", f"output={output}", "devices=[cpu]", cwd=tmp_path)
    predictions = rows(output / "predictions.csv")
    expected = cohen_kappa_score(
        [row["label"] for row in predictions], [row["class"] for row in predictions]
    )
    assert ours["val_kappa"] == pytest.approx(expected)
    failed = trainer(
        *words, "task.metrics=[broken]", "nproc=2", f"output={tmp_path / 'y'}", cwd=tmp_path
    )
    assert failed.returncode == 2 and "broken" in failed.stderr, failed.stderr


def test_a_users_metric_needs_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(metrics, "FUNCTIONS", copy.copy(FUNCTIONS))
    for name in ("auroc", "top7", "samples", "F2", "a b", "epoch"):
        with pytest.raises(RecipeError, match=name):
            metrics.register_metric(name, larger_is_better=True)


class Sharp(tasks.Classification):
    """A user's task whose sums do not have what other metrics need."""

    tells = ("loss", "sharpness")
    metric = "sharpness"

    def sums(self, outputs, targets):
        return {
            "loss": self.loss(outputs, targets) * len(targets),
            "sharp": outputs.amax(1).sum(),
        }

    def metrics(self, sums, count):
        return {
            "loss": sums["loss"].item() / count,
            "sharpness": sums["sharp"].item() / count,
        }


def test_a_task_with_its_own_sums_has_its_own_metrics(monkeypatch):
    monkeypatch.setattr(tasks.task, "_registered", copy.copy(tasks.task._registered))
    tasks.register_task("sharp")(Sharp)
    plain = build("task.name=sharp")
    assert plain.measured == () and plain.hidden == frozenset()
    assert (plain.metric, plain.larger_is_better) == ("sharpness", True)
    assert build("task.name=sharp", "task.metric=auroc").measured == ("auroc",)

    @tasks.register_task("doubtful")
    class Doubtful(Sharp):
        tells = ("loss", "sharpness", "gain")

    with pytest.raises(RecipeError, match=r"task\.metric=gain"):
        build("task.name=doubtful", "task.metric=gain")


def test_sums_of_a_user_are_not_taken_for_counts_of_classes():
    sums = {"loss": torch.zeros(()), "correct": torch.ones(())}
    inputs = MetricInputs(sums, 4, None, None, True, lambda *_: ())
    assert tabulate_classes(inputs) == {}
    sums |= {"actual": torch.ones(()), "predicted": torch.ones(())}
    assert tabulate_classes(inputs) == {}

"""Losses of whole runs compared with a plain loop without code of this package, and metrics
compared with scikit-learn's.

The model writes down what it is given. Each training image names itself in its pixels, so that the
loop sees by them alone which two images were mixed, and in which shares.
"""

import itertools

import numpy as np
import pytest
import torch

from tests.command_line import QUIET, losses
from tests.models.families import SEEN, Recording
from tests.tasks.evaluated_runs import SIZE, Rounded, train_and_evaluate
from trainer import tasks, train
from trainer.recipe import load

COUNT = 64
CLASSES = 4


def images():
    """Image n has its one white pixel at n in the first channel, and the gray of 3 n in
    the second.
    """
    pixels = np.zeros((COUNT, 3, SIZE, SIZE), np.uint8)
    pixels[:, 0] = (np.eye(COUNT) * 255).reshape(COUNT, SIZE, SIZE)
    pixels[:, 1] = 3 * np.arange(COUNT)[:, None, None]
    return pixels


def mixed_of(x):
    """Return the fractions of the images, by number, that are mixed in a model's input (3, SIZE,
    SIZE).
    """
    grays, areas = np.unique((x[1] * 255 / 3).numpy().round(4), return_counts=True)
    if len(grays) == 2:  # One image is pasted into the other.
        return {int(gray): area / SIZE**2 for gray, area in zip(grays, areas, strict=True)}
    return {n: float(share) for n, share in enumerate(x[0].flatten()) if share > 0}


def classification(logits, shares, labels, weights, smoothing):
    """A sample's loss: of each class that it has a share of, -log p, smoothed, times that class's
    weight.
    """
    total = 0
    for row, mixed in zip(logits, shares, strict=True):
        costs = -(row - row.exp().sum().log())
        for n, share in mixed.items():
            own = (1 - smoothing) * costs[labels[n]] + smoothing * costs.mean()
            total = total + share * weights[labels[n]] * own
    return total / len(logits)


def multilabel(logits, shares, labels, weights, smoothing):
    """The mean over samples and classes of -w y log p - (1 - y) log (1 - p)."""
    total = 0
    for row, mixed in zip(logits, shares, strict=True):
        y = sum(share * labels[n] for n, share in mixed.items())
        p = 1 / (1 + (-row).exp())
        total = total - (weights * y * p.log() + (1 - y) * (1 - p).log()).mean()
    return total / len(logits)


def by_hand(loss, labels, weights, smoothing, steps, outputs):
    """The losses of plain SGD over the inputs that the run has seen."""
    model = Recording(outputs).double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    passes = len(SEEN) // steps
    collected = []
    for step in range(steps):
        x = torch.cat(SEEN[step * passes : (step + 1) * passes])
        value = loss(
            model(x.double()),
            [mixed_of(image) for image in x],
            labels,
            weights,
            smoothing,
        )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        collected.append(value.item())
    return collected


MIXES = {"plain": [], "mixup": ["augment.mixup=0.7"], "cutmix": ["augment.cutmix=1"]}
MIXES["both"] = [*MIXES["mixup"], *MIXES["cutmix"]]
GIVEN = [0.5, 3.0, 1.0, 0.25]


@pytest.mark.parametrize(
    "mix",
    ["plain", "both", *(pytest.param(mix, marks=pytest.mark.slow) for mix in ("mixup", "cutmix"))],
)
@pytest.mark.parametrize("weighing", ["null", "balanced", str(GIVEN).replace(" ", "")])
@pytest.mark.parametrize(
    ("task", "smoothing"), [("classification", 0), ("classification", 0.2), ("multilabel", 0)]
)
def test_losses_are_those_of_a_plain_loop(task, smoothing, weighing, mix, tmp_path):
    """Options are tested alone and in pairs; the third class has no images, and all images have the
    last label.
    """
    from sklearn.utils.class_weight import compute_class_weight

    draw = np.random.default_rng(3)
    if task == "classification":
        labels = draw.choice(
            [0, 1, 3],
            COUNT,
            p=[0.6, 0.3, 0.1],
        )
        there = np.unique(labels)
        known_names = dict(
            zip(there, compute_class_weight("balanced", classes=there, y=labels), strict=True)
        )
        balanced = [known_names.get(place, 0.0) for place in range(CLASSES)]
    else:
        labels = (draw.random((COUNT, CLASSES)) < [0.5, 0.2, 0, 1]).astype(np.float32)
        balanced = [
            (1 - labels[:, 0]).sum() / labels[:, 0].sum(),
            (1 - labels[:, 1]).sum() / labels[:, 1].sum(),
            1,
            1,
        ]
    weights = torch.tensor(
        {"null": [1.0] * CLASSES, "balanced": balanced}.get(weighing, GIVEN)
    ).double()
    parts = [(images(), labels), (images()[:8], labels[:8])]
    SEEN.clear()
    train(
        None,
        f"task.name={task}",
        f"loss.label_smoothing={smoothing}",
        f"loss.class_weights={weighing}",
        *MIXES[mix],
        *QUIET,
        "data.mean=[0.0,0.0,0.0]",
        "data.std=[1.0,1.0,1.0]",
        "batch_size=16",
        "accumulate=2",
        "epochs=2",
        "threads=1",
        "optimizer.lr=0.05",
        "optimizer.momentum=0.9",
        "schedule.name=constant",
        "mode=single",
        model=Recording(CLASSES),
        data=(*parts, ["a", "b", "c", "d"]),
        output=str(tmp_path / "run"),
    )
    ours = losses(tmp_path / "run")
    loss = {"classification": classification, "multilabel": multilabel}[task]
    labels = labels if task == "classification" else torch.from_numpy(labels).double()
    assert len(ours) == 8
    assert ours == pytest.approx(
        by_hand(loss, labels, weights, smoothing, len(ours), CLASSES), rel=1e-5
    )
    shares = [mixed_of(x) for x in itertools.chain(*SEEN)]
    assert any(len(mixed) == 2 for mixed in shares) is (mix != "plain")
    assert len(shares) == 2 * COUNT


@pytest.mark.parametrize("there", [range(7), [1, 4, 6], [5]], ids=["all classes", "some", "one"])
def test_accuracies_are_scikit_learns(there, tmp_path):
    """The first of several classes with the same score is the answer, like NumPy's argmax, and the
    answer of `predict`.
    """
    from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

    targets = np.random.default_rng(6).choice(list(there), 75)
    names = list("abcdefg")
    result, outputs = train_and_evaluate(
        "classification", targets, names, tmp_path / "run", Rounded(len(names))
    )
    assert result["val_top1"] == pytest.approx(accuracy_score(targets, outputs.argmax(1)))
    apart = outputs - 1e-6 * np.arange(len(names))  # The scores have no ties.
    assert result["val_top5"] == pytest.approx(
        top_k_accuracy_score(targets, apart, k=5, labels=range(len(names)))
    )
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert result["val_loss"] == pytest.approx(
        log_loss(targets, p, labels=range(len(names))), rel=1e-5
    )
    classes, numbers = tasks.create_task(load(None), names).ranked(
        torch.from_numpy(outputs).float()
    )
    ranked = np.argsort(-apart, axis=1)[:, :5]
    assert classes.tolist() == ranked.tolist()
    assert classes[:, 0].tolist() == outputs.argmax(1).tolist()
    assert numbers.numpy() == pytest.approx(np.take_along_axis(p, ranked, 1), rel=1e-4)


def test_f1_is_scikit_learns(tmp_path):
    """Labels include one that no image has, one that all images have, and one that is never
    predicted.
    """
    from sklearn.metrics import f1_score, log_loss

    names = list("abcdef")
    targets = (np.random.default_rng(7).random((75, 6)) < [0.5, 0.2, 0, 1, 0.7, 0.4]).astype(
        np.float32
    )
    model = Recording(6)
    with torch.no_grad():
        model.fc.weight[5] = 0  # no probability is above 0.5
    result, outputs = train_and_evaluate("multilabel", targets, names, tmp_path / "run", model)
    message = outputs > 0
    assert result["val_f1"] == pytest.approx(f1_score(targets, message, average="micro"))
    assert result["val_f1_macro"] == pytest.approx(
        f1_score(targets, message, average="macro", zero_division=0)
    )
    p = 1 / (1 + np.exp(-outputs))
    each = [
        log_loss(
            targets[:, n],
            p[:, n],
            labels=[0, 1],
        )
        for n in range(6)
    ]
    assert result["val_loss"] == pytest.approx(np.mean(each), rel=1e-5)


def test_errors_of_a_regression_are_scikit_learns(tmp_path):
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    targets = np.random.default_rng(8).normal(1000, 3, (75, 2)).astype(np.float32)
    result, outputs = train_and_evaluate(
        "regression",
        targets,
        ["a", "b"],
        tmp_path / "run",
        Recording(2),
    )
    assert result["val_loss"] == pytest.approx(mean_squared_error(targets, outputs), rel=1e-5)
    assert result["val_mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-5)
    assert result["val_r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-4)

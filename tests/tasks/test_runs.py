"""Tasks of each kind through the real command line, in every mode: the numbers equal those of
`single`.
"""

import re
from functools import cache

import pytest

from tests.command_line import QUIET, latest, losses, ok, result, rows, steps, trainer
from tests.training.whole_runs import APART, MODES
from trainer import tasks
from trainer.recipe import load
from trainer.recipe.known_names import TASKS

PLUGIN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer import Classification, Task, register_dataset, register_model, register_task

def images(count, seed):
    return torch.randint(256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed),
        dtype=torch.uint8)

def both_parts(targets):
    return [(found, targets(found)) for found in (images(96, 0), images(37, 1))]

@register_dataset("bright")  # which pixels are bright, in images and as dense targets
def bright(data):
    return *both_parts(lambda found: (found[:, 0] > 127).long()), ["dark", "bright"]

@register_dataset("levels")  # the mean of each image, as a value
def levels(data):
    return *both_parts(lambda found: found.float().mean((1, 2, 3)) / 255), ["level"]

@register_dataset("corners")  # which corners of each image are bright: several labels
def corners(data):
    names = ["top left", "top right", "bottom left", "bottom right"]
    return *both_parts(lambda found: found[:, 0, ::7, ::7].flatten(1) > 127), names

@register_dataset("measured")  # inputs that are no images
def measured(data):
    def part(count, seed):
        x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64)
        return x, x @ torch.arange(10.0, dtype=torch.float64).view(5, 2)
    return part(96, 0), part(37, 1), ["one", "two"]

class Words(torch.utils.data.Dataset):  # whole numbers, item by item, read by workers
    def __init__(self, count, seed):
        self.tokens = torch.randint(20, (count, 6), generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.tokens)
    def __getitem__(self, index):
        return self.tokens[index], int(self.tokens[index].sum() > 57)

@register_dataset("words")
def words(data):
    return Words(96, 0), Words(37, 1), ["few", "many"]

@register_model("pixels")
def pixels(num_classes, channels, image_size):
    wide = lambda a, b: [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU()]
    return nn.Sequential(*wide(channels, 8), *wide(8, 8), *wide(8, 8), nn.Conv2d(8, num_classes, 1))

def deep(num_classes):
    hidden = [part for _ in range(3) for part in (nn.Tanh(), nn.Linear(16, 16))]
    return *hidden, nn.Linear(16, num_classes)

@register_model("dense")
def dense(num_classes, channels, image_size):
    return nn.Sequential(nn.Linear(channels, 16), *deep(num_classes))

@register_model("tokens")
def tokens(num_classes, channels, image_size):
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 16), *deep(num_classes))

@register_task("focal")
class Focal(Classification):
    def loss(self, outputs, targets):
        each = cross_entropy(outputs, targets, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

@register_task("promising")
class Promising(Classification):
    metric = "iou"
    tells = ("loss", "iou")

@register_task("segmentation")
class Segmentation(Task):
    metric, larger_is_better = "iou", True

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)

    def sums(self, outputs, targets):
        found, real = outputs.argmax(1) == 1, targets == 1
        return {**super().sums(outputs, targets), "both": (found & real).sum(),
            "either": (found | real).sum()}

    def metrics(self, sums, count):
        return {**super().metrics(sums, count), "iou": (sums["both"] / sums["either"]).item()}
"""
KINDS = {
    "multilabel": [
        "task.name=multilabel",
        "data.name=corners",
        "model.name=cnn_gn",
        "loss.class_weights=balanced",
    ],
    "multilabel mixed": [
        "task.name=multilabel",
        "data.name=corners",
        "model.name=cnn_gn",
        "augment.mixup=0.4",
    ],
    "regression": ["task.name=regression", "data.name=levels", "model.name=cnn_gn"],
    "segmentation": ["task.name=segmentation", "data.name=bright", "model.name=pixels"],
    "focal": ["task.name=focal", "recipe=digits", "model.name=cnn_gn"],
    "measurements": ["task.name=regression", "data.name=measured", "model.name=dense"],
    "tokens": ["data.name=words", "model.name=tokens", "data.workers=1"],
    "weighted": [
        "recipe=digits",
        "model.name=cnn_gn",
        "loss.class_weights=balanced",
        "augment.cutmix=1",
    ],
}
KINDS_OF_TASKS = {
    name: tasks.task.find_task_class(load(None, f"task.name={name}")) for name in TASKS
}
PLUGINS = {"focal": "top1", "segmentation": "iou"}
METRICS = PLUGINS | {"classification": "top1", "multilabel": "f1", "regression": "mae"}
# The metric that chooses the best epoch.
BEST = PLUGINS | {name: kind.metric for name, kind in KINDS_OF_TASKS.items()}
DIAGONAL = {
    ("multilabel mixed", "1f1b"),
    ("regression", "split"),
    ("segmentation", "split"),
    ("segmentation", "1f1b"),
    ("measurements", "streams"),
    ("tokens", "ddp"),
    ("weighted", "hogwild"),
    ("focal", "ddp"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "own_tasks.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def single(home):
    """mode=single's folder for a kind of task, trained when it is first asked for."""

    @cache
    def folder(kind):
        ok(*words(kind), "mode=single", f"output={home / kind.replace(' ', '-')}", cwd=home)
        return home / kind.replace(" ", "-")

    return folder


def words(kind):
    own = KINDS[kind] if "recipe=digits" not in KINDS[kind] else [*KINDS[kind], "max_steps=6"]
    same = [
        "batch_size=16",
        "epochs=2",
        "optimizer.lr=0.01",
        "augment.crop=none",
        "save.every_steps=3",
        "ema=0.5",
    ]
    return ["plugin=own_tasks", *same, *own, *QUIET]


def test_every_task_has_a_case():
    words = " ".join(word for case in KINDS.values() for word in case)
    assert all(f"task.name={name}" in words for name in {*TASKS} - {"classification"})


@pytest.mark.full(
    cases=["multilabel mixed-1f1b", "regression-split", "segmentation-split", "focal-ddp"]
)
@pytest.mark.slow(
    cases=[
        "weighted-hogwild",
        "multilabel mixed-1f1b",
        "focal-ddp",
        "tokens-ddp",
        "segmentation-1f1b",
        "measurements-streams",
        "regression-split",
    ]
)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "single"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_in_every_mode(kind, mode, single, home, tmp_path, full):
    if (kind, mode) not in DIAGONAL and not full:
        pytest.skip("a sample; --all takes every one")
    ok(*words(kind), *MODES[mode], f"output={tmp_path / 'run'}", cwd=home)
    ours = result(tmp_path / "run")
    reference = result(single(kind))
    metric = METRICS[ours["task"]]
    assert ours[f"val_{metric}"] is not None and ours[f"best_{BEST[ours['task']]}"] is not None
    assert ours["data"]["val_samples"] == reference["data"]["val_samples"]
    if mode in APART:
        return
    assert losses(tmp_path / "run") == pytest.approx(losses(single(kind)), rel=1e-4)
    assert {key for key in ours if key.startswith("val_")} >= {"val_loss", f"val_{metric}"}
    for key in reference:
        if key.startswith("val_"):
            assert ours[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-4), key


@pytest.mark.slow(cases=["segmentation"])
@pytest.mark.parametrize(
    "kind", ["segmentation", "tokens", pytest.param("multilabel", marks=pytest.mark.full)]
)
def test_a_task_is_resumed_and_evaluated(kind, single, home, tmp_path):
    folder = tmp_path / "run"
    killed = trainer(
        *words(kind),
        *MODES["ddp"],
        f"output={folder}",
        cwd=home,
        env={"TRAINER_FAULT": "kill@1:5"},
    )
    assert killed.returncode != 0
    assert [row["step"] for row in steps(folder)][-1] in ("3", "4")
    ok(*words(kind), *MODES["split"], f"output={folder}", "resume=auto", cwd=home)
    assert losses(folder) == pytest.approx(losses(single(kind)), rel=1e-4)
    output = ok("evaluate", folder, "last", "plugin=own_tasks", cwd=home).stdout
    assert f"val loss {result(folder)['val_loss']:.4f}" in output and "on 37 held-out" in output
    metric = METRICS[result(folder)["task"]]
    assert (
        f"{result(folder)[f'val_{metric}']:.4f}" in output
        or f"{result(folder)[f'val_{metric}']:.2%}" in output
    )


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        (
            "segmentation",
            ["augment.hflip=0.5"],
            r"augment\.hflip=0\.5 .*data\.name=bright, .*\b8 x 8\b",
        ),
        (
            "segmentation",
            ["data.image_size=16"],
            r"\b8 x 8 .*\b16 x 16\b.*data\.image_size=\[8,8\]",
        ),
        (
            "segmentation",
            ["task.name=classification"],
            r"data\.name=bright, task\.name=classification: .*int64 \(96, 8, 8\)",
        ),
        (
            "measurements",
            ["augment.hflip=0.5"],
            r"augment\.hflip=0\.5 .*data\.name=measured ",
        ),
        ("measurements", ["model.name=cnn"], r"model\.name=cnn .*\(5,\)"),
        (
            "weighted",
            ["task.name=regression", "loss.class_weights=null", "augment.cutmix=0"],
            r"task\.name=regression: .*data\.labels=FILE\.csv",
        ),
        (
            "focal",
            ["task.name=promising"],
            r"task\.name=promising: .*\bloss, top1, top5, .*\biou\b",
        ),
    ],
)
def test_an_impossible_combination_is_one_line(kind, more, says, home, tmp_path):
    completed = trainer(
        *latest(*words(kind), *more), "mode=single", f"output={tmp_path / 'run'}", cwd=home
    )
    assert completed.returncode == 2, completed.stderr
    assert re.search(says, completed.stderr), completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.slow
def test_predictions_of_each_task(single, home, tmp_path):
    """Predictions are probabilities of several classes, and values in order.

    A message reports missing names and images.
    """
    plain = ["plugin=own_tasks", "devices=[cpu]", "logging.progress=false"]

    def predict(kind, start=ok):
        return start(
            "predict", f"checkpoint={single(kind)}", *plain, f"output={tmp_path / kind}", cwd=home
        )

    predict("multilabel mixed")
    table_rows = rows(tmp_path / "multilabel mixed" / "predictions.csv")
    assert len(table_rows) == 37
    assert all(row["label"] == "" and row["error"] == "" for row in table_rows)
    messages = [[part.rpartition("=") for part in row["top5"].split(";")] for row in table_rows]
    corners = {"top left", "top right", "bottom left", "bottom right"}
    assert all({name for name, _, _ in each} == corners for each in messages)
    assert all(0 < float(number) < 1 for each in messages for _, _, number in each)
    assert any(sum(float(number) for _, _, number in each) > 1.2 for each in messages), "no softmax"
    predict("regression")
    assert {row["class"] for row in rows(tmp_path / "regression" / "predictions.csv")} == {"level"}
    for kind, says in (
        ("segmentation", "task.name=segmentation has no `ranked`"),
        ("measurements", "than images"),
    ):
        gone = predict(kind, trainer)
        assert gone.returncode == 2 and says in gone.stderr and gone.stderr.count("\n") == 1, (
            gone.stderr
        )

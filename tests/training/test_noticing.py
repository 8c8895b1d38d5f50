"""Runs that go wrong in one way each, with their message; healthy runs have no message."""

from __future__ import annotations

import operator
import re
import textwrap
from types import SimpleNamespace

import pytest
import torch

from tests.command_line import latest, ok, result, scalars, suggested
from trainer.recipe import load
from trainer.saving.journal import read_journal
from trainer.tasks import Classification, Multilabel
from trainer.training.noticing import note_classes

SMALL = [
    "logging.progress=false",
    "logging.tensorboard=false",
    "save.every_epochs=null",
    "threads=1",
]
DIGITS = ["recipe=digits_single", *SMALL]
CHARTED = [word for word in SMALL if "tensorboard" not in word]
MADE = """
    import torch
    from trainer import register_dataset
    from trainer.data import open_datasets
    from trainer.recipe import load

    sets = open_datasets(load("digits_single"))
    (images, labels), (seen,
        truth) = ((part.images, part.labels) for part in (sets.train, sets.val))
    names = list("0123456789")

    @register_dataset("nonsense")
    def nonsense(data):
        "Labels that have nothing to do with the images."
        return (images, labels[torch.randperm(len(labels))]), (seen, truth), names
"""
STRAINED = """
    import trainer.training.observer as observer
    from trainer.devices.host import Strain

    class Meter(observer.StrainMeter):
        def read(self):
            return Strain(12.0, others=0.55)

    observer.StrainMeter = Meter
"""
LEARNS = [  # models with rates at which they learn the digits
    ("cnn", "0.05"),
    ("cnn", "0.2"),
    ("cnn_gn", "0.05"),
    ("mlp", "0.05"),
    ("mlp", "0.2"),
    ("resnet8", "0.1"),
]
VARIED = [
    [],
    ["batch_size=32"],
    ["batch_size=240", "accumulate=2"],
    ["schedule.name=constant", "schedule.warmup_epochs=0"],
    ["loss.label_smoothing=0.2"],
    ["augment.mixup=0.4"],
    ["augment.cutmix=1", "loss.label_smoothing=0.1"],
    ["ema=0.99"],
    ["loss.class_weights=balanced"],
    ["data.balance=true", "clip_grad_norm=1"],
    ["max_steps=2"],
    ["epochs=1", "schedule.warmup_epochs=0"],
    ["optimizer.name=adamw", "optimizer.lr=0.002"],
    ["max_steps=40"],
    ["stop.patience=1"],
    ["model.num_classes=12"],
    ["schedule.warmup_epochs=3"],
]


def trained(folder, *words):
    """Return the output of a run before its last lines, and its result.

    Each suggestion in the output can be typed.
    """
    completed = ok(*words, "output=run", cwd=folder)
    end = result(folder / "run")
    for remedy in suggested(" ".join(end["warnings"].values())):
        load("digits_single", *instead(words, remedy))
    message = " ".join(
        line for title, line in lines(completed.stdout) if title in ("verdict", "warning")
    ).lower()
    # The load of the machine was printed when it was noticed, with the figure of that time.
    said = [sentence for kind, sentence in end["warnings"].items() if kind != "cores"]
    assert all(sentence.lower() in message for sentence in said), message
    meanwhile, _, _ = completed.stdout.partition("  done ")
    return [line for title, line in lines(meanwhile) if title == "warning"], end


def instead(words, remedy):
    """Return a run's arguments with a suggestion, and without those that only a command line
    accepts.
    """
    key = remedy.partition("=")[0]
    return [
        word for word in words if not word.startswith((f"{key}=", "recipe=", "plugin=", "nproc="))
    ] + [remedy]


def lines(text):
    """The lines of a page, each with its title; what was wrapped is whole again."""
    whole = re.sub(r"\n {11,}(?=\S)", " ", text)
    return [(line[2:12].strip(), line[12:]) for line in whole.splitlines()]


def learning(end):
    """The kinds of what is wrong with the learning; the machine may be busy with other tests."""
    return end["warnings"].keys() - {"cores"}


@pytest.mark.slow
def test_a_loss_above_guessing(tmp_path):
    words = [
        *DIGITS,
        "optimizer.lr=20",
        "schedule.name=constant",
        "schedule.warmup_epochs=0",
        "epochs=4",
    ]
    meanwhile, end = trained(tmp_path, *words)
    assert learning(end) == {"loss"} and "2.30" in end["warnings"]["loss"]
    assert len([line for line in meanwhile if re.search(r"\(2\.30\).*optimizer\.lr=", line)]) == 1
    lower, _ = suggested(end["warnings"]["loss"])
    ok("recipe=digits_single", *instead(words, lower), "output=lower", cwd=tmp_path)
    assert result(tmp_path / "lower")["train_loss"] < end["train_loss"] / 10


def test_accuracy_at_the_largest_class(tmp_path):
    (tmp_path / "made.py").write_text(textwrap.dedent(MADE))
    words = [
        "plugin=made",
        "data.name=nonsense",
        *DIGITS,
        "schedule.warmup_epochs=0",
        "epochs=4",
        "batch_size=32",
    ]
    meanwhile, end = trained(tmp_path, *words, "ema=null", "model.name=mlp")
    assert learning(end) == {"accuracy"}
    remedies = suggested(end["warnings"]["accuracy"])
    assert [remedy.partition("=")[0] for remedy in remedies] == ["optimizer.lr", "optimizer.lr"]
    assert len([line for line in meanwhile if re.search(r"accuracy .* \d+%\D+\d+%", line)]) == 1


@pytest.mark.slow(cases=["0.0-True"])
@pytest.mark.parametrize(("seconds", "early"), [(0.0, True), (11.9, False)])
def test_a_machine_that_cannot_compute(seconds, early, tmp_path):
    """The load is printed once: within the first epoch if it is long, and not again at the end."""
    change = f"import trainer.training.noticing as noticing\nnoticing.LONG = {seconds}\n"
    (tmp_path / "strained.py").write_text(textwrap.dedent(STRAINED) + change)
    words = ["plugin=strained", *DIGITS, "epochs=2", "output=run"]
    text = ok(*words, cwd=tmp_path).stdout
    end = result(tmp_path / "run")
    [line] = [line for title, line in lines(text) if "other processes" in line]
    assert all(word in line and word in end["verdict"]["sentence"] for word in ("55%", "top shows"))
    assert (text.index("other processes") < text.index(" 1/2 ")) == early


WAITING = """
    import os, time
    from trainer.data import Loader

    whole = Loader.training

    def training(self, *arguments):
        for number, batch in enumerate(whole(self, *arguments)):
            if number % 2 == int(os.environ.get("RANK", 0)):
                time.sleep(0.05)
            yield batch

    Loader.training = training
"""


@pytest.mark.slow
def test_all_reports_of_a_run_have_one_share_of_waiting_for_data(tmp_path):
    """Each rank waits in every second step, and the other rank waits for it."""
    (tmp_path / "waiting.py").write_text(textwrap.dedent(WAITING))
    words = ["recipe=digits", "plugin=waiting", "mode=ddp", "nproc=2", *CHARTED]
    words += ["model.name=mlp", "logging.every_steps=1", "logging.warmup_steps=3", "epochs=2"]
    _, end = trained(tmp_path, *words)
    share = end["data_wait_fraction"]
    assert share > 0.6
    assert share == pytest.approx(end["verdict"]["step"]["data"])
    assert sum(end["verdict"]["step"].values()) == pytest.approx(1)
    waited = end["goodput"]["seconds"]["waiting for data"]
    charted = scalars(tmp_path / "run")
    seconds = [value / 1e3 for _, value in charted["speed/step_ms"]]
    assert waited == pytest.approx(share * sum(seconds), rel=0.02)
    shares = [value / 100 for _, value in charted["speed/data_wait_pct"]]
    assert waited == pytest.approx(sum(map(operator.mul, shares, seconds)), rel=0.02)


SLOW = """
    import os, time
    import trainer.telemetry.rank_watch as rank_watch
    from torch import nn
    from trainer import register_model
    from trainer.data import Loader

    rank_watch.WINDOW, rank_watch.WINDOWS, rank_watch.FEW = 0.1, 2, 1
    SLOW = os.environ.get("RANK") == "1"
    whole = Loader.training

    class Slow(nn.Linear):
        def forward(self, x):
            if self.training and x.device.type != "meta":
                time.sleep(0.03 + 0.05 * (SLOW and {compute}))
            return super().forward(x)

    def training(self, *arguments):
        for batch in whole(self, *arguments):
            time.sleep(0.05 * (SLOW and not {compute}))
            yield batch

    Loader.training = training

    @register_model("slow")
    def slow(num_classes, channels, image_size):
        return nn.Sequential(nn.Flatten(), Slow(channels * image_size ** 2, 32), nn.ReLU(),
            nn.Linear(32, num_classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "compute"),
    [
        ("ddp", False),
        *(pytest.param(mode, True, marks=pytest.mark.full) for mode in ("fsdp", "local_sgd")),
    ],
)
def test_a_rank_that_holds_up_the_others_is_named(mode, compute, tmp_path):
    """The windows are very short."""
    (tmp_path / "slow_rank.py").write_text(textwrap.dedent(SLOW.format(compute=compute)))
    words = ["recipe=digits", "plugin=slow_rank", f"mode={mode}", "nproc=2", *CHARTED]
    meanwhile, end = trained(tmp_path, *words, "model.name=slow", "max_steps=80", "epochs=9")
    # The other message may appear at some moments, too.
    [line] = [line for line in meanwhile if line.startswith("rank 1 (")]
    assert line == end["warnings"]["rank 1"]
    assert re.search(r"cpu\) .*\d% ", line)
    assert ("shares=auto" in line) == compute
    [attempt] = read_journal(tmp_path / "run" / "journal.jsonl")[0]
    assert [sentence for sentence in attempt.noticed if sentence.endswith(line)]
    assert max(value for _, value in scalars(tmp_path / "run")["speed/slowest_rank_pct"]) > 20


@pytest.mark.full("runs of each mode, long enough to notice")
def test_ranks_and_stages_notice_alike(tmp_path):
    """Classes are counted on all ranks, even if only the last stage has outputs."""
    for mode in ("ddp", "pipeline"):
        words = [
            f"mode={mode}",
            "nproc=2",
            "optimizer.lr=1e-6",
            "epochs=5",
            "batch_size=32",
            "model.name=mlp",
        ]
        ok(
            "recipe=digits",
            *SMALL,
            *words,
            "schedule.warmup_epochs=0",
            f"output={mode}",
            cwd=tmp_path,
        )
        assert learning(result(tmp_path / mode)) == {"accuracy"}, mode


FULL = pytest.mark.full("a hundred runs")


@pytest.mark.slow(cases=["7"])
@pytest.mark.parametrize(
    "number", [7, *(pytest.param(number, marks=FULL) for number in range(102) if number != 7)]
)
def test_healthy_runs_get_no_message(number, tmp_path):
    """No message is about learning, at the end or before."""
    (model, rate), varied = LEARNS[number % len(LEARNS)], VARIED[number % len(VARIED)]
    words = [
        f"model.name={model}",
        f"optimizer.lr={rate}",
        f"epochs={4 + number % 5}",
        f"seed={number}",
    ]
    words = latest(*words, *varied)
    meanwhile, end = trained(tmp_path, *DIGITS, *words)
    before = [line for line in meanwhile if not re.match("other processes", line)]
    assert [*learning(end), *before] == [], (words, end["losses"], end["val_top1"])


def test_only_a_classification_is_checked_for_its_accuracy():
    """The warnings about accuracy read `top1`, which a multilabel task does not have."""
    sums = SimpleNamespace(whole=dict.fromkeys(("actual", "predicted"), torch.ones(2)))
    for kind, name in ((Classification, "classification"), (Multilabel, "multilabel")):
        noticed = SimpleNamespace(classes=[])
        note_classes(kind(load(None, f"task.name={name}"), ("a", "b")), noticed, sums)
        assert len(noticed.classes) == (kind is Classification)

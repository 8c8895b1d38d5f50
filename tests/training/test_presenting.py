"""Charts and pictures in TensorBoard, read from the files of real runs."""

from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import ok, trainer
from trainer.data import Batch
from trainer.recipe import load
from trainer.tasks import Classification, Multilabel, Regression
from trainer.training import presenting

SMALL = [
    "recipe=digits",
    "model.name=cnn_gn",
    "epochs=2",
    "logging.every_steps=2",
    "logging.warmup_steps=1",
]
SMALL += ["logging.progress=false", "threads=1"]
TOLD = [
    "train/lr",
    "train/grad_norm",
    "val/loss",
    "val/top1",
    "val/top5",
    "speed/samples_per_sec",
    "speed/step_ms",
]
TOLD += ["speed/samples_per_sec_per_device", "speed/data_wait_pct", "memory/peak_gib/cpu"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A pipeline that was killed and continued."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    killed = [
        *SMALL,
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "pipeline.microbatches=4",
        "save.every_steps=9",
        f"output={folder}",
    ]
    assert trainer(*killed, env={"TRAINER_FAULT": "kill@0:12"}).returncode != 0
    ok(*killed, "resume=auto")
    return EventAccumulator(str(folder)).Reload()


@pytest.mark.slow
def test_tags_are_plain_names(shown):
    tags = shown.Tags()["scalars"]
    groups = {tag.split("/")[0] for tag in tags}
    assert groups == {"memory", "pipeline", "save", "speed", "train", "val"}
    assert {*TOLD} <= {*tags}


def test_a_continued_run_is_one_curve(shown):
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(2, 29, 2))
    assert [event.step for event in shown.Scalars("val/top1")] == [14, 28]


def test_pictures(shown):
    batch, matrix = shown.Tags()["images"]
    assert [batch, matrix] == ["view/batch as the model sees it", "view/confusion matrix"]
    for tag in shown.Tags()["images"]:
        [picture] = shown.Images(tag)
        assert picture.encoded_image_string.startswith(b"\x89PNG")


def test_a_server_that_reads_while_a_run_is_continued_forgets_what_comes_again(tmp_path):
    from trainer.saving.checkpoint import Position
    from trainer.saving.journal import OTHER
    from trainer.saving.run_folder import RunFolder
    from trainer.telemetry.clocks import Ledger
    from trainer.telemetry.tracking import Tracker

    recipe = load("digits", f"output={tmp_path / 'run'}", "resume=auto")
    # The saved step is resumed.
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    reader = EventAccumulator(str(tmp_path / "run"))
    for position, last in ((Position(0, 0, 0), 8), (Position(5, 0, 5), 10)):
        tracker = Tracker(recipe, RunFolder(recipe), Ledger(OTHER))
        tracker.start(position, 10, "top1")
        for step in range(position.step + 1, last + 1):
            tracker.scalars({"train/loss": float(step)}, step)
        tracker.close()
        reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == list(range(1, 11))


def test_a_picture_that_cannot_be_drawn_ends_no_run():
    messages = []
    tracker = SimpleNamespace(shows=True, say=messages.append)
    presenting.show_first_batch(
        tracker, None, None, Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), 2)
    )
    [line] = messages
    assert "AttributeError" in line


@pytest.mark.parametrize(
    ("shape", "count"), [((8, 1, 4, 4), 8), ((96, 3, 224, 224), 32), ((4, 1, 2048, 2048), 1)]
)
def test_fewer_large_images_are_shown(shape, count, monkeypatch):
    looked = []
    monkeypatch.setattr(
        presenting, "as_pictures", lambda datasets, inputs: looked.append(len(inputs))
    )
    tracker = SimpleNamespace(shows=True)
    presenting.show_first_batch(
        tracker, None, None, Batch(torch.empty(shape), torch.empty(0), shape[0])
    )
    assert looked == [count]


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        (Classification, torch.tensor(1), "dog"),
        (Classification, torch.tensor(7), "7"),
        (Classification, torch.tensor([0.3, 0.7]), "dog 70%, cat 30%"),
        (Classification, torch.zeros(4, 4, dtype=torch.int64), ""),
        (Classification, torch.empty(0), ""),
        (Multilabel, torch.tensor([1.0, 1.0]), "dog, cat"),
        (Regression, torch.tensor([31.0, 1.72]), "31, 1.72"),
    ],
)
def test_a_target_in_words(kind, target, words):
    names = ["cat", "dog"]
    assert presenting.format_caption(kind(load("digits"), names), names, target) == words

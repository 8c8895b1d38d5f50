"""Tags of runs that version 0.1 has started, and which tags the end of an epoch logs."""

import pytest

from trainer.telemetry import events

LOGGED = [
    "train/loss",
    "train/lr",
    "val/loss",
    "val/top1",
    "val/top5",
    "speed/samples_per_sec",
    "speed/step_ms",
    "speed/data_wait_pct",
    "speed/val_samples_per_sec",
    "memory/peak_gib/cpu",
    "pipeline/bubble_pct",
]
FIRST = [
    "1_train_loss",
    "2_val_loss",
    "3_val_top1",
    "4_samples_per_sec",
    "5_val_samples_per_sec",
    "6_data_wait_pct",
]


@pytest.mark.parametrize(("metric", "first"), [("top1", FIRST), ("loss", [*FIRST[:2], *FIRST[3:]])])
def test_runs_of_version_0_1_keep_their_tags(metric, first):
    actual = events.rename_as_before({tag: float(n) for n, tag in enumerate(LOGGED)}, metric)
    # TensorBoard builds and sorts them like this.
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in sorted(actual)))
    assert groups == ["overview", "speed", "train", "val", "z_memory", "z_pipeline"]
    assert [
        tag.removeprefix("overview/") for tag in sorted(actual) if tag.startswith("overview/")
    ] == first
    assert actual["overview/1_train_loss"] == actual["train/loss"] == 0.0
    assert {tag for tag in LOGGED if tag.startswith(("train/", "val/", "speed/"))} <= set(actual)
    assert events.rename_as_before({"train/lr": 0.1}, "top1") == {"train/lr": 0.1}, (
        "nothing is made up"
    )


@pytest.mark.parametrize(
    ("tag", "again"),
    [
        ("val/top1", True),
        ("overview/3_val_top1", True),
        ("z_memory/peak_gib/cpu", True),
        ("z_summary/best_top1", True),
        ("view/2 worst predictions", True),
        ("speed/val_samples_per_sec", True),
        ("memory/peak_gib/cpu", True),
        ("train/loss", False),
        ("overview/1_train_loss", False),
        ("speed/samples_per_sec", False),
        ("z_pipeline/bubble_pct", False),
    ],
)
def test_which_values_an_epochs_end_logs(tag, again):
    assert bool(events.AT_END.match(tag)) is again


def test_a_run_of_version_0_1_is_recognized_by_its_first_step(tmp_path):
    for name, tags in (("old", ["train/loss", "overview/1_train_loss"]), ("new", ["train/loss"])):
        writer = events.Events(tmp_path / name)
        writer.scalars(dict.fromkeys(tags, 1.0), 1)
        writer.close()
    assert events.has_old_tags(tmp_path / "old")
    assert not events.has_old_tags(tmp_path / "new")
    assert not events.has_old_tags(tmp_path / "empty")

"""The file result.json matches its type and the guide."""

from dataclasses import fields
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter

from tests.command_line import WHOLE, ok, result
from tests.pages import GUIDE, result_table
from trainer.recipe.metric_table import METRICS
from trainer.tasks import Classification, Multilabel, Regression
from trainer.telemetry.clocks import Speed, StepTime, Throughput
from trainer.training.results import Metrics, Result


def test_the_guide_lists_the_keys():
    assert result_table() in (GUIDE / "folder.md").read_text()


@pytest.mark.slow
def test_a_runs_result_has_these_keys_and_types(tmp_path):
    words = [
        "recipe=digits",
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "model.name=cnn_gn",
        "max_steps=16",
        *WHOLE,
    ]
    ok(*words, "save.every_steps=4", f"output={tmp_path / 'run'}")
    run_result = result(tmp_path / "run")
    metrics = {name for name, row in METRICS.items() if "classification" in row.tasks}
    assert run_result.keys() == Result.__required_keys__ | {
        "best_top1",
        *(f"val_{name}" for name in metrics),
    }
    assert run_result["pipeline"] and run_result["throughput"] and run_result["verdict"]
    hints = get_type_hints(Result)
    for key, value in run_result.items():
        TypeAdapter(hints[key]).validate_python(value, strict=True)
    assert [*run_result["data"]] == [
        "name",
        "synthetic",
        "train_samples",
        "val_samples",
        "skipped",
        "uncached",
    ]
    speed = {field.name for field in fields(Speed)}
    assert speed <= run_result.keys()
    assert [*run_result["step_time_s"]] == [field.name for field in fields(StepTime)]
    assert [*run_result["throughput"]] == [
        *(field.name for field in fields(Throughput)),
        "per_device",
        "threads",
    ]
    message = run_result["save"]  # after 4, 8, 12 and 16 steps, and the epoch's 14
    assert message["count"] == 5 and 0 < message["blocked_s"] <= message["seconds"]
    assert all(
        type(run_result["data"][key]) is int
        for key in ("train_samples", "val_samples", "skipped", "uncached")
    )


def test_the_type_has_the_metrics_of_all_tasks():
    kinds = [Classification, Multilabel, Regression]
    message = {f"val_{name}" for name in METRICS} | {f"best_{kind.metric}" for kind in kinds}
    assert message == Metrics.__optional_keys__

"""Run folders as training leaves them, made by hand in no time."""

import csv
import json
import os

from trainer.recipe import load
from trainer.saving.steps_file import STEP_COLUMNS
from trainer.telemetry.events import Events

RESULT = {
    "recipe": "digits", "mode": "single", "status": "completed", "error": None, "world_size": 1, "devices": ["cpu"],
    "precision": "fp32", "epochs": 2, "steps": 28, "data": {"name": "digits", "train_samples": 90},
    "train_loss": 0.5, "val_loss": 0.4, "val_top1": 0.9, "best_top1": 0.95, "best_epoch": 1, "seconds": 7.0,
    "throughput": {"samples_per_sec": 1234.5}, "step_time_s": {"mean": 0.02}, "losses": [1.5, 0.5],
    "peak_memory_bytes": {"cpu": 2_000_000}, "verdict": {"sentence": "it computes"}, "versions": {"torch": "2.14"},
}  # fmt: skip


def make(path, *words, age=0, curve=True, **result):
    """A run of `digits`, `age` seconds old; a result of None is a run killed before its first epoch ended."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(load("digits", "mode=single", *words).to_yaml())
    (path / ".lock").write_text("job")
    (path / "checkpoints" / "step-00000028").mkdir(parents=True)
    (path / "checkpoints" / "step-00000028" / "model.safetensors").write_bytes(b"0" * 1000)
    (path / "last.safetensors").write_bytes(b"0" * 500)
    if result.get("status", "") is not None:
        (path / "result.json").write_text(json.dumps({**RESULT, **result}))
    with (path / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        writer.writerows([step, 0, step / 10, 2 / step, 0.1, 100] for step in range(1, 20 if curve else 2))
    if curve:
        events = Events(path)
        for step in range(5, 20, 5):
            events.scalars({"val/top1": step / 20}, step)
        events.close()
    for file in path.iterdir():
        then = file.stat().st_mtime - age
        os.utime(file, (then, then))
    return path

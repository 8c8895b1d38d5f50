"""`on_nonfinite=skip:N` through the real command line: steps that are not finite on one rank are left out by all."""

from __future__ import annotations

import math

import pytest
from safetensors.torch import load_file

from tests.command_line import losses, ok, result, steps, trainer
from tests.modes.test_modes import COLUMNS, in_turn

WORDS = ["batch_size=64", "optimizer.lr=0.01", "schedule.warmup_epochs=0", "augment.crop=none", "ema=0.9", "threads=1"]
WORDS += ["logging.progress=false", "logging.tensorboard=false", "logging.every_steps=1", "on_nonfinite=skip:2"]
WAYS = [name for name in COLUMNS if name not in ("`local_sgd`", "`hogwild`")]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_all_modes_leave_out_the_same_steps(count, tmp_path, full):
    """The losses are those of `single`; BatchNorm takes in nothing of such a step, on no rank."""
    jobs, ways = {}, [way for way in WAYS if COLUMNS[way][0] == count and (full or way != "`dp`")]
    for way in ways:
        words = [*COLUMNS[way][1], *WORDS, "max_steps=5"]
        jobs[way] = [*words, "model.name=cnn_gn", f"output={tmp_path / way}"]
        jobs[f"norms {way}"] = [*words, "model.name=cnn", f"output={tmp_path / f'norms {way}'}"]
    env = {"TRAINER_FAULT": "nan@0:2,nan@0:4"}
    ended = in_turn(jobs, count, tmp_path / "script", timeout=240, env=env)
    assert all(code == 0 for code, _ in ended.values()) and len(ended) == len(jobs), ended
    plain = [*WORDS, "recipe=digits", "max_steps=5", "mode=single", "model.name=cnn_gn", "devices=[cpu]"]
    reference = tmp_path / "reference"
    ok(*plain, f"output={reference}", env=env)
    wanted = [loss for loss in losses(reference) if math.isfinite(loss)]
    assert len(wanted) == 3
    for way in ways:
        found, rows = result(tmp_path / way), steps(tmp_path / way)
        assert [loss for loss in losses(tmp_path / way) if math.isfinite(loss)] == pytest.approx(wanted, rel=1e-4), way
        assert found["val_loss"] == pytest.approx(result(reference)["val_loss"], rel=1e-4), way
        assert found["nonfinite_steps"] == 2 and [row["skipped"] for row in rows] == ["0", "1", "1", "2", "2"], way
        assert "2, 4" in found["warnings"]["not finite"] and found["steps"] == 5, way
        assert found["train_loss"] == pytest.approx(sum(wanted) / 3, rel=1e-4), way
        weights = load_file(tmp_path / f"norms {way}" / "last.safetensors")
        counts = {int(tensor) for name, tensor in weights.items() if name.endswith("num_batches_tracked")}
        assert counts == {3} and math.isfinite(result(tmp_path / f"norms {way}")["val_loss"]), way


@pytest.mark.slow
def test_the_count_goes_on_where_a_run_is_continued(tmp_path):
    """Killed after the first of two, with a second one after; a third is one too many, and ends the run as ever."""
    words = ["recipe=digits", "mode=ddp", "nproc=2", *WORDS, "model.name=cnn", "max_steps=9", "save.every_steps=3"]
    ok(*words, f"output={tmp_path / 'whole'}", env={"TRAINER_FAULT": "nan@1:2,nan@1:5"})
    run = [*words, "resume=auto", f"output={tmp_path / 'run'}"]
    trainer(*run, env={"TRAINER_FAULT": "nan@1:2,kill@1:5"})
    ended = trainer(*run, env={"TRAINER_FAULT": "nan@1:4,nan@1:5"})
    assert ended.returncode == 5 and "once more" in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr
    done = ok(*run, env={"TRAINER_FAULT": "nan@1:5"})
    assert "step 5: " in done.stdout and "2 of on_nonfinite=skip:2" in done.stdout
    whole, found = result(tmp_path / "whole"), result(tmp_path / "run")
    assert found["nonfinite_steps"] == 2 and "2 steps (2, 5)" in found["verdict"]["sentence"]
    assert str(losses(tmp_path / "run")) == str(losses(tmp_path / "whole")), "each NaN at its place"
    assert found["val_loss"] == whole["val_loss"]

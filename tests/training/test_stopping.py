"""Early stopping through the real command line: when a run ends, that it can be continued, and what it says."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, losses, ok, result, steps
from trainer.recipe import load
from trainer.saving.checkpoint import Position
from trainer.training import stopping
from trainer.training.state import History

# A learning rate that moves nothing: the first epoch is the best.
STILL = ["recipe=digits", "model.name=mlp", "optimizer.lr=1e-12", "augment.crop=none", "batch_size=256", *QUIET]
STILL += ["optimizer.weight_decay=0", "schedule.warmup_epochs=0", "logging.tensorboard=false", "logging.verdict=false"]
MODES = {
    "single": ["mode=single"],
    "ddp": ["mode=ddp", "nproc=2"],
    "streams": ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.microbatches=2"],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.microbatches=2"],
    "hogwild": ["mode=hogwild", "nproc=2"],
}
FAST = ("single", "1f1b", "hogwild")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_stops(mode, tmp_path, full):
    if mode not in FAST and not full:
        pytest.skip("one line decides for all modes: --all")
    done = ok(*STILL, *MODES[mode], "stop.patience=2", "epochs=9", f"output={tmp_path / 'run'}")
    assert re.search(r"stopped: 2 epochs .*top-1.*\bepoch 1\b", done.stdout)
    found = result(tmp_path / "run")
    assert (found["status"], found["ended_by"], found["epochs"], found["exit_code"]) == (
        "completed",
        "stop.patience",
        3,
        0,
    )
    assert (tmp_path / "run" / "last.safetensors").is_file() and (tmp_path / "run" / "best.safetensors").is_file()


@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.full("as single"))])
def test_a_stopped_run_stays_so_until_patience_is_raised(mode, tmp_path):
    run = [*STILL, *MODES[mode], "epochs=5", f"output={tmp_path / 'run'}"]
    ok(*run, "stop.patience=2")
    again = ok(*run, "stop.patience=2", "resume=auto")
    assert "resuming at step 15 of 25" in again.stdout
    found = result(tmp_path / "run")
    assert (found["ended_by"], found["epochs"], found["steps"], len(losses(tmp_path / "run"))) == (
        "stop.patience",
        3,
        15,
        15,
    )
    ok(*run, "stop.patience=3", "resume=auto")
    found = result(tmp_path / "run")
    assert (found["ended_by"], found["epochs"], found["steps"]) == ("stop.patience", 4, 20)
    ok(*run, "stop.patience=null", "resume=auto")
    found = result(tmp_path / "run")
    assert (found["ended_by"], found["epochs"], found["steps"]) == ("epochs", 5, 25)
    ok(*[word for word in run if not word.startswith("output")], f"output={tmp_path / 'whole'}")
    assert steps(tmp_path / "run") != [] and losses(tmp_path / "run") == losses(tmp_path / "whole"), "to the last bit"


@pytest.mark.parametrize(
    ("best", "best_epoch", "epoch", "patience", "lost"),
    [
        (0.5, 0, 1, 1, False),
        (0.5, 0, 2, 1, True),
        (0.5, 3, 4, 1, False),
        (0.5, 3, 6, 3, False),
        (0.5, 3, 7, 3, True),
        (None, None, 0, 1, False),
        (math.nan, 4, 5, 6, False),  # NaN is worse than anything, and no best
        (math.nan, 4, 5, 5, True),
        (0.5, 0, 99, None, False),
    ],
)
def test_patience(best, best_epoch, epoch, patience, lost):
    resolved = SimpleNamespace(recipe=load(None, f"stop.patience={json.dumps(patience)}"), speed_only=False)
    history, position = History(best=best, best_epoch=best_epoch), Position(0, epoch, 0)
    assert stopping.lost_patience(resolved, SimpleNamespace(history=history, position=position)) is lost

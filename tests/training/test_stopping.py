"""Early stopping through the real command line: the end of a run, resuming it, and the messages."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from tests.command_line import QUIET, losses, ok, result
from trainer.recipe import load
from trainer.saving.checkpoint import Position
from trainer.training import stopping
from trainer.training.state import History

# A learning rate without effect, so the first epoch is the best.
STILL = [
    "recipe=digits",
    "model.name=mlp",
    "optimizer.lr=1e-12",
    "augment.crop=none",
    "batch_size=256",
    *QUIET,
]
STILL += ["optimizer.weight_decay=0", "schedule.warmup_epochs=0"]
MODES = {"single": ["mode=single"], "ddp": ["mode=ddp", "nproc=2"]}
STAGES = ["mode=pipeline", "nproc=2", "pipeline.microbatches=2"]


@pytest.mark.slow
def test_ranks_without_outputs_stop_too(tmp_path):
    completed = ok(*STILL, *STAGES, "stop.patience=2", "epochs=9", f"output={tmp_path / 'run'}")
    assert re.search(r"stopped: 2 epochs .*top-1.*\bepoch 1\b", completed.stdout)
    run_result = result(tmp_path / "run")
    assert (run_result["status"], run_result["exit_code"]) == ("completed", 0)
    assert ended(tmp_path / "run")[:2] == (
        "stop.patience",
        3,
    )
    assert (tmp_path / "run" / "last.safetensors").is_file()
    assert (tmp_path / "run" / "best.safetensors").is_file()


def ended(folder):
    run_result = result(folder)
    return run_result["ended_by"], run_result["epochs"], run_result["steps"], len(losses(folder))


@pytest.mark.slow(cases=["single"])
@pytest.mark.parametrize(
    "mode", ["single", pytest.param("ddp", marks=pytest.mark.full("as single"))]
)
def test_a_stopped_run_stays_so_until_patience_is_raised(mode, tmp_path):
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    words = [*STILL, *MODES[mode], "epochs=5"]
    ok(*words, "stop.patience=2", f"output={run}")
    words += ["resume=auto"]
    completed = ok(*words, "stop.patience=2", f"output={run}")
    assert re.search(r"resuming\D+15\D+25\b", completed.stdout)
    assert ended(run) == ("stop.patience", 3, 15, 15)
    ok(*words, "stop.patience=3", f"output={run}")
    assert ended(run) == ("stop.patience", 4, 20, 20)
    ok(*words, "stop.patience=null", f"output={run}")
    ok(*words, f"output={whole}")
    assert ended(run) == ended(whole) == ("epochs", 5, 25, 25) and losses(run) == losses(whole), (
        "to the last bit"
    )


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
    resolved = SimpleNamespace(
        recipe=load(None, f"stop.patience={json.dumps(patience)}"), speed_only=False
    )
    history = History(best=best, best_epoch=best_epoch)
    position = Position(0, epoch, 0)
    assert (
        stopping.has_lost_patience(resolved, SimpleNamespace(history=history, position=position))
        is lost
    )

"""Saving during training, through the command line: failures of one rank's saver, and the remaining
files.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer as api
from tests.command_line import QUIET, ok, trainer
from trainer.errors import DiskFullError, PeerError
from trainer.modes import base
from trainer.recipe import TRAITS
from trainer.saving import checkpoint

RUN = [
    "recipe=digits",
    "model.name=cnn_gn",
    "batch_size=256",
    "epochs=3",
    "ema=0.9",
    "max_steps=15",
    *QUIET,
]
MODES = [mode for mode, traits in TRAITS.items() if traits.processes != "one"]
FAULTS = [
    f"{kind}@save#{rank}:{point}"
    for kind in ("full", "kill")
    for rank in (0, 1)
    for point in ("write", "fsync")
]
FAULTS += ["full@save#0:rename", "kill@save#0:tmp", "kill@save#0:rename"]
FAST = {("ddp", "kill@save#0:rename")}
PAIRS = [
    pytest.param(
        mode,
        fault,
        marks=[] if (mode, fault) in FAST else [pytest.mark.full("eleven faults a mode")],
    )
    for mode in MODES
    for fault in FAULTS
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return the final weights of each mode, computed once."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fault"), PAIRS)
def test_a_save_that_fails_on_one_rank_is_heard_by_all_and_costs_that_save(
    mode: str, fault: str, tmp_path: Path, undisturbed: dict[str, dict[str, torch.Tensor]]
) -> None:
    ranks = [*RUN, f"mode={mode}", "nproc=2"]
    words = [*ranks, "save.every_steps=4", "resume=auto", f"output={tmp_path / 'run'}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:6"}).returncode
    home = tmp_path / "run" / "checkpoints"
    before = sorted(path.name for path in home.glob("step-????????"))
    assert before == ["step-00000004"]
    completed = trainer(*words, env={"TRAINER_FAULT": fault})
    codes = {DiskFullError.code} if fault.startswith("full") else {PeerError.code, -signal.SIGKILL}
    assert completed.returncode in codes and "Traceback" not in completed.stderr, completed.stderr
    assert len(completed.stderr.splitlines()) == 1
    assert sorted(path.name for path in home.glob("step-????????")) == before, (
        "nothing half is named a checkpoint"
    )
    if fault.startswith("full"):
        assert [path.name for path in home.iterdir()] == before, "the draft is gone"
    checkpoint.load(home / before[0])
    ok(*words)
    assert [path.name for path in home.iterdir() if ".tmp-" in path.name] == []
    if TRAITS[mode].shared_memory:
        return  # Runs of this mode are not repeatable.
    if mode not in undisturbed:
        ok(*ranks, f"output={tmp_path / 'whole'}")
        undisturbed[mode] = load_file(tmp_path / "whole" / "last.safetensors")
    atol = 1e-6 if mode == "pipeline" else 0  # The cut is measured in each run.
    torch.testing.assert_close(
        load_file(tmp_path / "run" / "last.safetensors"), undisturbed[mode], rtol=0, atol=atol
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["full@save#1:write", pytest.param("full@save#0:rename", marks=pytest.mark.full)]
)
def test_the_last_save_fails_at_once_on_all_ranks(fault: str, tmp_path: Path) -> None:
    """Rank 0 waits for the files of the other ranks, but not for those of a failed one."""
    words = [
        "recipe=digits",
        "model.name=mlp",
        "mode=fsdp",
        "nproc=2",
        "epochs=1",
        "timeout=600",
        *QUIET,
    ]
    completed = trainer(
        *words, f"output={tmp_path / 'run'}", env={"TRAINER_FAULT": fault}, timeout=120
    )
    assert completed.returncode == DiskFullError.code and len(completed.stderr.splitlines()) == 1, (
        completed.stderr
    )
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_best_checkpoint_may_have_been_saved_before_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that compiles saves its first epoch before the evaluation, which is the best here."""
    monkeypatch.setattr(base, "compile_in_place", lambda module: None)
    keys = {"model.name": "mlp", "optimizer": {"lr": 1e-12}, "mode": "single", "devices": ["cpu"]}
    keys |= {
        "batch_size": 400,
        "epochs": 5,
        "compile": True,
        "save": {"top_k": 1, "every_epochs": 1},
    }
    api.train("digits", *QUIET, **keys, output=str(tmp_path / "run"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000012", "step-00000015"]

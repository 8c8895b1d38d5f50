"""Ranks that are forked: they are started again after one was lost, and import what any process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.command_line import QUIET, digest, losses, ok, result, trainer, within
from tests.storms import Job
from tests.warm import Popen
from trainer.errors import NotFiniteError, PeerError

WORDS = ["recipe=digits", "model.name=cnn_gn", "epochs=1", *QUIET, "save.every_steps=4"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [("mode=single", "kill@0:10"), ("nproc=2", "kill@1:10"), ("nproc=2", "kill@0:6")])
def test_a_lost_rank_starts_all_again_and_the_run_ends_as_an_undisturbed_one(
    how: tuple[str, str], tmp_path: Path
) -> None:
    word, fault = how
    ok(*WORDS, word, f"output={tmp_path}/undisturbed")
    words = [*WORDS, word, f"output={tmp_path}/run"]
    done = ok(*words, "max_restarts=1", env={"TRAINER_FAULT": fault})
    assert done.stderr.count("SIGKILL") == 1 and "1 of 1" in done.stderr and "resuming at step" in done.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed") and len(losses(tmp_path / "run")) == 14
    assert digest(tmp_path / "run/last.safetensors") == digest(tmp_path / "undisturbed/last.safetensors")


def test_what_a_rank_fails_of_by_itself_is_not_tried_again(tmp_path: Path) -> None:
    words = [*WORDS, "nproc=2", "max_restarts=2", f"output={tmp_path}/run"]
    done = trainer(*words, env={"TRAINER_FAULT": "nan@1:6"})
    assert done.returncode == NotFiniteError.code and len(done.stderr.splitlines()) == 1
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_ranks_are_forked_from_is_killed(restarts: int, tmp_path: Path) -> None:
    words = [*WORDS[:2], "epochs=40", *WORDS[3:], "nproc=2"]
    job = Job(tmp_path / "run", *words, *[f"max_restarts={restarts}"] * restarts, start=Popen)
    try:
        assert within(60, lambda: any(job.folder.glob("checkpoints/step-????????"))), job.text()
        os.kill(int(Path(f"/proc/{job.ranks()['0']}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        if restarts:
            assert within(60, lambda: "resuming at step" in job.text()), job.text()
            job.main.terminate()
        code, _ = job.end(60)
        assert code == (143 if restarts else PeerError.code) and "forked" in job.text(), job.text()
    finally:
        job.clear()


def test_a_file_of_the_users_is_not_taken_for_a_library(tmp_path: Path) -> None:
    for name in ("random", "tempfile", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"print('the user has a {name}.py')\n")
    done = ok(*WORDS, "nproc=2", "max_steps=2", "output=run", cwd=tmp_path)
    assert "the user has" not in done.stdout + done.stderr

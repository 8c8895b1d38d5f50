"""Forked ranks: they restart after one was lost, and import the same modules as any process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.command_line import QUIET, digest, losses, ok, result, trainer, within
from tests.storms import Job
from tests.warm import Popen
from trainer.errors import NotFiniteError, PeerError
from trainer.saving.journal import JOURNAL, read_journal

WORDS = ["recipe=digits", "model.name=cnn_gn", "epochs=1", *QUIET, "save.every_steps=4"]


@pytest.mark.full(cases=["how2"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [("mode=single", "kill@0:10"), ("nproc=2", "kill@1:10"), ("nproc=2", "kill@0:6")]
)
def test_a_lost_rank_starts_all_again_and_the_run_ends_as_an_undisturbed_one(
    how: tuple[str, str], tmp_path: Path
) -> None:
    word, fault = how
    ok(*WORDS, word, f"output={tmp_path}/undisturbed")
    words = [*WORDS, word, f"output={tmp_path}/run"]
    completed = ok(*words, "max_restarts=1", env={"TRAINER_FAULT": fault})
    assert completed.stderr.count("SIGKILL") == 1
    assert "1 of 1" in completed.stderr
    attempts, _ = read_journal(tmp_path / "run" / JOURNAL)
    assert [bool(attempt.resumed) for attempt in attempts] == [False, True]
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert len(losses(tmp_path / "run")) == 14
    assert digest(tmp_path / "run/last.safetensors") == digest(
        tmp_path / "undisturbed/last.safetensors"
    )


def test_a_rank_that_fails_by_itself_is_not_restarted(tmp_path: Path) -> None:
    words = [*WORDS, "nproc=2", "max_restarts=2", f"output={tmp_path}/run"]
    completed = trainer(*words, env={"TRAINER_FAULT": "nan@1:6"})
    assert completed.returncode == NotFiniteError.code and len(completed.stderr.splitlines()) == 1
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow(cases=["1"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_the_fork_server_of_ranks_is_killed(restarts: int, tmp_path: Path) -> None:
    words = [*WORDS[:2], "epochs=40", *WORDS[3:], "nproc=2"]
    job = Job(tmp_path / "run", *words, *[f"max_restarts={restarts}"] * restarts, start=Popen)
    try:
        assert within(60, lambda: any(job.folder.glob("checkpoints/step-????????"))), job.text()
        os.kill(
            int(Path(f"/proc/{job.ranks()['0']}/stat").read_text().rpartition(")")[2].split()[1]),
            signal.SIGKILL,
        )
        if restarts:
            assert within(60, lambda: "resuming" in job.text()), job.text()
            job.main.terminate()
        code, _ = job.end(60)
        assert code == (143 if restarts else PeerError.code) and "forked" in job.text(), job.text()
    finally:
        job.clear()


def test_a_file_of_the_users_is_not_taken_for_a_library(tmp_path: Path) -> None:
    for name in ("random", "tempfile", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"print('SHADOW {name}')\n")
    completed = ok(*WORDS, "nproc=2", "max_steps=2", "output=run", cwd=tmp_path)
    assert "SHADOW" not in completed.stdout + completed.stderr

"""A rank is lost: who waits for it on the host tells which, before the cards' communicator aborts the process."""

import pytest

from tests.command_line import QUIET, ok, result, trainer

WORDS = ["recipe=digits", "model.name=mlp", "mode=ddp", "nproc=2", "max_steps=9", "timeout=5", *QUIET]
PLUGIN = "plugin=tests.simulated.two_communicators"
SILENT = "rank 1 was silent for 5 s: it is stopped"
alike = pytest.mark.full("one of several alike")
MUTANTS = {
    "one timeout for both": "world.NCCL_LATER = timedelta(0)",
    "no rank asks the others on the host": "world.World.heartbeat = lambda _: None; world.NCCL_LATER = timedelta(0)",
}


def test_a_run_in_which_nobody_is_lost(tmp_path):
    ok(*WORDS, PLUGIN, f"output={tmp_path / 'run'}")
    assert result(tmp_path / "run")["steps"] == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        ("card stop", SILENT),
        pytest.param("host stop", SILENT, marks=alike),
        pytest.param("card kill", "rank 1 was killed by SIGKILL", marks=alike),
        pytest.param("card hang", "has hung, or waits for another", marks=alike),
    ],
)
def test_a_lost_rank_is_told_before_a_card_gives_up(leaves, told, tmp_path):
    done = trainer(*WORDS, PLUGIN, f"output={tmp_path / 'run'}", env={"TRAINER_TEST_LEAVES": leaves})
    assert done.returncode == 7, done.stdout + done.stderr
    assert told in done.stderr and "SIGABRT" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.full("mutants, of which each waits for a timeout")
@pytest.mark.parametrize(
    ("mutant", "leaves"),
    [
        ("one timeout for both", "card hang"),
        ("one timeout for both", "card stop"),
        ("no rank asks the others on the host", "card stop"),
    ],
)
def test_a_card_that_gives_up_first_aborts(mutant, leaves, tmp_path):
    code = f"from datetime import timedelta\nfrom trainer.processes import world\n{MUTANTS[mutant]}\n"
    (tmp_path / "mutant.py").write_text(code + "import tests.simulated.two_communicators\n")
    words = [*WORDS, "plugin=mutant", f"output={tmp_path / 'run'}"]
    done = trainer(*words, env={"TRAINER_TEST_LEAVES": leaves}, cwd=tmp_path)
    assert "was killed by SIGABRT" in done.stderr and "silent for" not in done.stderr, done.stderr

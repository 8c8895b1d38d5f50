"""A rank is lost: ranks that wait for it on the host name it before the cards' communicator aborts
the process.
"""

import re

import pytest

from tests.command_line import QUIET, ok, result, trainer

WORDS = [
    "recipe=digits",
    "model.name=mlp",
    "mode=ddp",
    "nproc=2",
    "max_steps=9",
    "timeout=5",
    *QUIET,
]
PLUGIN = "plugin=tests.simulated.two_communicators"
SILENT = r"rank 1 .*\b5 s\b"
alike = pytest.mark.full("one of several alike")
MUTANTS = {
    "one timeout": "world.NCCL_LATER = timedelta(0)",
    "no heartbeat": "world.World.heartbeat = lambda _: None; world.NCCL_LATER = timedelta(0)",
}


@pytest.mark.slow
def test_a_run_in_which_nobody_is_lost(tmp_path):
    ok(*WORDS, PLUGIN, f"output={tmp_path / 'run'}")
    assert result(tmp_path / "run")["steps"] == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "pattern"),
    [
        ("card stop", SILENT),
        pytest.param("host stop", SILENT, marks=alike),
        pytest.param("card kill", r"rank 1 .*\bSIGKILL\b", marks=alike),
        pytest.param("card hang", r"rank \d: cuda:\d .*\btimeout=5\b", marks=alike),
    ],
)
def test_a_lost_rank_is_reported_before_a_card_gives_up(leaves, pattern, tmp_path):
    completed = trainer(
        *WORDS, PLUGIN, f"output={tmp_path / 'run'}", env={"TRAINER_TEST_LEAVES": leaves}
    )
    assert completed.returncode == 7, completed.stdout + completed.stderr
    assert (
        re.search(pattern, completed.stderr)
        and "SIGABRT" not in completed.stderr
        and "Traceback" not in completed.stderr
    ), completed.stderr
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.full("mutants, of which each waits for a timeout")
@pytest.mark.parametrize(
    ("mutant", "leaves"),
    [
        ("one timeout", "card hang"),
        ("one timeout", "card stop"),
        ("no heartbeat", "card stop"),
    ],
)
def test_a_card_that_gives_up_first_aborts(mutant, leaves, tmp_path):
    imports = "from datetime import timedelta\nfrom trainer.distributed import world\n"
    code = f"{imports}{MUTANTS[mutant]}\n"
    (tmp_path / "mutant.py").write_text(code + "import tests.simulated.two_communicators\n")
    words = [*WORDS, "plugin=mutant", f"output={tmp_path / 'run'}"]
    completed = trainer(*words, env={"TRAINER_TEST_LEAVES": leaves}, cwd=tmp_path)
    assert "SIGABRT" in completed.stderr, completed.stderr
    assert not re.search(SILENT, completed.stderr), completed.stderr

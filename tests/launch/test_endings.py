"""The failure that explains those of the other ranks."""

import json
import re
import signal

import pytest

from trainer.errors import (
    DeviceMemoryError,
    DiskFullError,
    Interrupted,
    NotFiniteError,
    PeerError,
    Preempted,
    RecipeError,
    TrainerError,
    describe_bug,
    explain_in_one_line,
)
from trainer.launch.endings import (
    STOPPED,
    Ending,
    cause,
    first_cause,
    say,
    with_stack,
    write_report,
)
from trainer.processes import family, stacks
from trainer.processes.watchdog_process import WATCHDOG_SIGNAL


@pytest.mark.parametrize(
    ("endings", "rank", "code", "line"),
    [
        ([Ending(0, 7, "lost", 1.0), Ending(1, 5, "nan", 2.0)], 1, 5, "nan"),
        ([Ending(0, -15, "", 1.0), Ending(1, 1, "", 2.0)], 1, 1, r"rank 1 .*\bcode 1$"),
        ([Ending(0, 143, "saved", 1.0), Ending(1, 7, "lost", 2.0)], 1, 7, "lost"),
        (
            [Ending(0, 7, "lost", 1.0), Ending(1, -9, "", 2.0)],
            1,
            7,
            r"rank 1 .*SIGKILL \(.*memory",
        ),
        (
            [Ending(0, -11, "", 1.0), Ending(1, 7, "lost", 0.0)],
            0,
            7,
            "rank 0 .*SIGSEGV",
        ),
        ([Ending(0, 3, "b", 2.0), Ending(1, 2, "a", 1.0)], 1, 2, "a"),
        ([Ending(1, 2, "same", 1.0), Ending(0, 2, "same", 1.0)], 0, 2, "same"),
        (
            [Ending(0, 7, "rank 1 silent", 1.0), Ending(1, -9, "", 32.0)],
            0,
            7,
            "rank 1 silent",
        ),  # torchrun's
        (
            [Ending(3, 7, "lost", 1.0), Ending(0, 7, f"rank 1: {STOPPED}", 1.2)],
            0,
            7,
            "rank 1: .*SIGSTOP",
        ),
        (
            [Ending(0, -11, "", 2.0), Ending(1, 7, f"rank 0: {STOPPED}", 1.0)],
            1,
            7,
            "rank 0: .*SIGSTOP",
        ),
        ([Ending(0, 143, "saved", 1.0), Ending(1, 143, "saved", 1.0)], 0, 143, "saved"),
        (
            [Ending(0, -2, "", 1.0), Ending(1, 7, "lost", 0.5)],
            0,
            130,
            "rank 0 .*SIGINT",
        ),
        ([Ending(0, -15, "", 1.0)], 0, 143, "rank 0 .*SIGTERM"),
        (
            [Ending(0, -6, "", 1.0), Ending(1, -9, "", 2.0)],
            1,
            7,
            r"rank 1 .*SIGKILL \(.*memory",
        ),
        (
            [Ending(0, -6, "", 1.0), Ending(1, 7, "lost", 2.0)],
            0,
            7,
            r"rank 0 .*SIGABRT \(NCCL",
        ),
        (
            [Ending(0, -11, "", 2.0), Ending(1, 7, "lost", 1.0)],
            0,
            7,
            r"rank 0 .*SIGSEGV \(.*torch",
        ),
        # The rank was killed while Python started.
        ([Ending(0, -12, "", 1.0)], 0, 143, "rank 0 .*SIGUSR2"),
        ([Ending(0, -64, "", 1.0)], 0, 7, "rank 0 .*SIGRTMAX"),
        (
            [Ending(0, 7, "lost", 10.0), Ending(1, -WATCHDOG_SIGNAL, "", 17.0)],
            0,
            7,
            "lost",
        ),  # the watchdog's end is no cause
        ([Ending(1, -WATCHDOG_SIGNAL, "", 17.0)], 1, 143, "rank 1 .*SIGVTALRM"),
    ],
)
def test_the_first_cause(
    endings: list[Ending],
    rank: int,
    code: int,
    line: str,
) -> None:
    actual = first_cause(endings)
    assert (actual.rank, actual.code) == (rank, code)
    assert re.match(line, actual.line)


LOST = "rank 0: lost another rank"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (Interrupted("Ctrl-C"), "SIGINT"),
        (KeyboardInterrupt(), "SIGINT"),
        (Preempted("stopped by SIGUSR1"), "SIGUSR1"),
        (NotFiniteError("nan"), "not finite"),
        (MemoryError("full"), DeviceMemoryError.cause),
        (DiskFullError("full"), "disk full"),
        (
            PeerError(f"{LOST} (`timeout`): Connection closed"),
            "lost rank",
        ),
        (
            PeerError(f"{LOST} (...): timed out (5000 ms)"),
            "time limit",
        ),
        (ValueError("a bug"), "error"),
    ],
)
def test_a_cause_in_a_word_or_two(error, name, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert cause(error, signal.SIGUSR1).partition(":")[0] == name


def test_the_cause_of_a_rank_that_lost_another_is_the_others(tmp_path, monkeypatch):
    for rank, (line, code) in enumerate([("lost", 7), ("lost", 7), ("out of memory", 6)]):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        write_report(line, code, 5.0)
    assert cause(PeerError("lost another rank"), None) == f"{DeviceMemoryError.cause} on rank 2"
    assert cause(NotFiniteError("nan"), None) == "not finite"


def test_a_bug_is_located_in_the_users_own_code(tmp_path, monkeypatch):
    own = tmp_path / "trainer" / "own.py"  # a folder of this name need not be ours
    own.parent.mkdir()
    own.write_text("import json\n\ndef read():\n    return json.loads('{')\n")
    collected = {}
    exec(compile(own.read_text(), str(own), "exec"), collected)
    with pytest.raises(ValueError) as caught:
        collected["read"]()
    message = describe_bug(caught.value)
    assert message == f"JSONDecodeError: {caught.value} ({own}:4, in read)"
    assert explain_in_one_line(caught.value) == (message, 1)
    assert explain_in_one_line(TrainerError("on_epoch raised it")) == ("on_epoch raised it", 1)
    assert explain_in_one_line(RecipeError("no")) == ("no", 2)
    stack = "Traceback\n  ..."
    assert with_stack(stack, caught.value) == f"{message}\n{stack}"
    assert (
        with_stack("on_epoch raised it", TrainerError("on_epoch raised it")) == "on_epoch raised it"
    )
    monkeypatch.setattr(stacks, "append", lambda text: tmp_path / "stacks-rank0.txt")
    line = with_stack(stack, caught.value)
    assert line.startswith(f"{message}; ")
    assert line.endswith(f" {tmp_path / 'stacks-rank0.txt'}")
    assert "\n" not in line


def test_torchrun_takes_a_lost_peer_for_no_cause_and_shows_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for name in ("RANK", "WORLD_SIZE", family.PARENT):
        monkeypatch.delenv(name, raising=False)

    def left(code):
        write_report("KeyError: x\nTraceback", code, 100.5)
        return json.loads((tmp_path / "error.json").read_text())["message"]

    bug = left(1)
    lost = left(7)
    assert bug["message"] == bug["extraInfo"]["py_callstack"] == "KeyError: x"
    assert int(bug["extraInfo"]["timestamp"]) < int(lost["extraInfo"]["timestamp"])
    assert bug["extraInfo"]["time"] == lost["extraInfo"]["time"] == 100.5


def test_names_in_an_error_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    say("look at \x1b[2Jred\x07", 3)
    assert capsys.readouterr().err == "trainer: error: look at ?[2Jred?\n"

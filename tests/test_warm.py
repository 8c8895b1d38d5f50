"""Processes that are forked warm are like those that Python starts: arguments, files, environment,
parent, exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

PYTHON = sys.executable


def said(*command, **options):
    return warm.run(
        [PYTHON, *map(str, command)],
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_a_program_in_each_form(tmp_path):
    program = "import sys, torch; print(__name__, sys.argv[1:], sys.path[0])"
    (tmp_path / "program.py").write_text(program)
    assert said("-c", program, "a", 1).stdout == "__main__ ['a', '1'] \n"
    assert said("-", "a", input=program).stdout == "__main__ ['a'] \n"
    assert said(tmp_path / "program.py", "b").stdout == f"__main__ ['b'] {tmp_path}\n"
    assert said("-m", "program", "c", cwd=tmp_path).stdout == f"__main__ ['c'] {tmp_path}\n"


@pytest.mark.parametrize(
    ("ends", "code", "last"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit('a word')", 1, "a word"),
        ("raise ValueError(7)", 1, "ValueError: 7"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
)
def test_each_end(ends, code, last):
    completed = said("-c", f"import os, signal, sys\n{ends}")
    assert (completed.returncode, completed.stderr.strip().rpartition("\n")[2]) == (code, last)


def test_its_parent_and_its_environment_are_to_the_kernel_what_they_are_to_itself():
    program = (
        "import os; print(os.getppid(), os.environ['RANK'], 'HOME' in "
        "os.environ, flush=True); input()"
    )
    with warm.Popen(
        [PYTHON, "-c", program],
        env={"RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == f"{os.getpid()} 3 False\n"
        assert Path(f"/proc/{child.pid}/environ").read_bytes().strip(b"\0") == b"RANK=3"
        child.stdin.write("\n")
    assert child.returncode == 0


def test_session_signal_mask_and_ignored_signals_are_inherited():
    program = (
        "import os, signal; print(os.getsid(0) == os.getpid(), signal.SIGUSR1 "
        "in signal.pthread_sigmask(0, ()))\n"
    )
    program += "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        completed = said("-c", program, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before)
    assert completed.stdout == "True True\nTrue\n"


def test_children_of_a_warm_process_are_warm_too():
    program = "import os, subprocess, sys, torch; print(os.getpid(), flush=True)\n"
    program += "inner = 'import os, sys; print(os.getppid(), \"torch\" in sys.modules)'\n"
    program += "subprocess.run([sys.executable, '-c', inner], check=True)"
    first, second = said("-c", program).stdout.splitlines()
    assert second == f"{first} True"


def test_who_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        said("-c", "import time; time.sleep(1000)", timeout=0.5)

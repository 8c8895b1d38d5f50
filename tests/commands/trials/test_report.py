"""Other programs that run during a comparison."""

import subprocess
import sys
import time

import pytest

from tests.command_line import environment
from tests.data.photo_folders import coloured
from trainer.commands.trials.report import OtherProcesses, is_busy
from trainer.processes import resources


def test_other_programs_are_noticed():
    """A child that is still running counts as another program, because only ended children are
    known.
    """
    others = OtherProcesses()
    if others.cores() is None:
        pytest.skip("the kernel does not tell")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        time.sleep(1)
        seen = others.cores()
        spinning.kill()
    assert seen > 0.3
    assert is_busy(seen)
    assert not is_busy(0.1)


def test_a_large_machine_has_services_of_its_own(monkeypatch):
    monkeypatch.setattr(resources, "count_cores", lambda: 100)
    assert [is_busy(cores) for cores in (0.3, 0.9, 1.0, None)] == [False, False, True, False]


ADOPTS = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
run = subprocess.Popen([sys.executable, "-m", "trainer", *sys.argv[1:]], stdout=subprocess.DEVNULL)
while True:
    try:
        pid, status, used = os.wait4(-1, 0)
    except ChildProcessError:
        break
    print(int(pid == run.pid), os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
"""


@pytest.mark.slow
def test_the_time_of_all_processes_of_a_run_counts_as_ours(tmp_path):
    """Processes of a run that are not reaped yet would look like other programs."""
    for label in ("a", "b"):
        for number in range(20):
            coloured(
                tmp_path / "photos" / label / f"{number}.jpg",
                (200, 60, 60),
                size=(300, 300),
                seed=number,
            )
    words = [
        f"data.root={tmp_path / 'photos'}",
        "data.name=imagefolder",
        "data.image_size=64",
        "data.workers=1",
    ]
    words += ["nproc=2", "epochs=2", "batch_size=16", f"output={tmp_path / 'run'}", "devices=[cpu]"]
    completed = subprocess.run(
        [sys.executable, "-c", ADOPTS, *words],
        env=environment(),
        capture_output=True,
        text=True,
    )
    rows = [line.split() for line in completed.stdout.splitlines()]
    assert [row[1] for row in rows if row[0] == "1"] == ["0"], completed.stderr
    assert sum(float(row[2]) for row in rows if row[0] == "0") < 0.5

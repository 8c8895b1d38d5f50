"""The whole trip on a machine that is at hand for a short while, with stand-ins for what it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests import first_minutes

SCRIPT = Path(first_minutes.__file__)
PROVE = """
import importlib.util, json, os, sys, time
from pathlib import Path
words = dict(word.partition("=")[::2] for word in sys.argv[2:])
folder = Path(words["output"])
(folder / "logs").mkdir(parents=True, exist_ok=True)
(folder / "kept.json").write_text("{}")
(folder / "logs" / "single.log").write_text("step 20")
found = importlib.util.find_spec("neededthing") is not None
print("proving", words["minutes"], "neededthing", found, flush=True)
if os.environ.get("STUCK"):
    time.sleep(600)
for name in ("proof.json", "proof.md", "proof.png"):
    (folder / name).write_text(json.dumps(words))
sys.exit(int(os.environ.get("CODE", "0")))
"""
TESTS = """
import subprocess, sys
import pytest

@pytest.mark.gpu
def test_card():
    subprocess.run([sys.executable, "-c", "import neededthing"], env={}, check=True)

def test_other():
    raise SystemError
"""


@pytest.fixture
def machine(tmp_path):
    """A copy of the project with stand-ins, and a folder of wheels: one of what is missing, one of what is there."""
    project, wheels = tmp_path / "project", tmp_path / "wheels"
    for path, text in {
        "trainer/__init__.py": "",
        "trainer/__main__.py": PROVE,
        "tests/first_minutes.py": SCRIPT.read_text(),
        "tests/test_gpu.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["gpu"]\n',
    }.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    wheels.mkdir()
    for name in ("neededthing", "torch"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('of the wheel')" if name == "torch" else "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
    return tmp_path


def start(machine, *words, **environment):
    line = [
        sys.executable,
        str(machine / "project" / "tests" / "first_minutes.py"),
        "--wheels",
        str(machine / "wheels"),
    ]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [*line, "--out", str(machine / "out"), *words], cwd=machine, env={**kept, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_whole_trip(machine):
    trip = start(machine, "--minutes", "2", "devices=[cpu,cpu]")
    output, _ = trip.communicate(timeout=120)
    assert trip.returncode == 0, output
    out = machine / "out"
    assert {path.name for path in out.iterdir()} == {
        "proof.json", "proof.md", "proof.png", "kept.json", "prove.log", "tests.log", "logs.tar.gz",
    }  # fmt: skip
    words = json.loads((out / "proof.json").read_text())
    assert words["devices"] == "[cpu,cpu]" and float(words["minutes"]) == pytest.approx(1.3)
    assert "neededthing True" in (out / "prove.log").read_text(), "what is missing came with a wheel"
    assert not (machine / "runs" / "first_minutes" / "wheels" / "torch").exists(), "what is installed stays as it is"
    assert "1 passed, 1 deselected" in (out / "tests.log").read_text()
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert archive.getnames() == ["single.log"]


@pytest.mark.slow
def test_what_is_wrong_is_its_exit_code_and_the_tests_run_all_the_same(machine):
    trip = start(machine, "--minutes", "2", CODE="3")
    output, _ = trip.communicate(timeout=120)
    assert trip.returncode == 3 and "exit codes [3, 0]" in output


@pytest.mark.slow
def test_time_that_is_up_ends_it_with_what_is_done(machine):
    trip = start(machine, "--minutes", "0.15", "--only", "prove", STUCK="1")
    output, _ = trip.communicate(timeout=60)
    assert trip.returncode == 124, output
    assert (machine / "out" / "kept.json").exists() and "exit codes [124]" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_cut_off_it_has_brought_home_what_was_done(number, machine):
    trip = start(machine, "--minutes", "5", STUCK="1")
    end = time.monotonic() + 60
    while not (machine / "out" / "kept.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    trip.send_signal(number)
    trip.communicate(timeout=60)
    assert {"kept.json", "prove.log"} <= {path.name for path in (machine / "out").iterdir()}
    assert "proving" in (machine / "out" / "prove.log").read_text()


def test_what_is_too_large_stays_where_it_is(tmp_path):
    home, out = tmp_path / "home", tmp_path / "out"
    (home / "proof" / "logs").mkdir(parents=True)
    out.mkdir()
    (home / "proof" / "proof.png").write_bytes(b"\0" * (first_minutes.LARGEST + 1))
    (home / "proof" / "proof.md").write_text("right")
    for name, size in (("small", 10), ("huge", first_minutes.LARGEST)):
        (home / "proof" / "logs" / f"{name}.log").write_bytes(b"\0" * size)
    first_minutes.bring(home, out)
    first_minutes.bring_logs(home, out)
    assert sorted(path.name for path in out.iterdir()) == ["logs.tar.gz", "proof.md"]
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert archive.getnames() == ["small.log"]

"""The whole trip on a machine that is available for a short while: with stand-ins, and once on the
CPU.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests import first_minutes
from tests.command_line import environment, ok, result
from trainer.recipe import load

SCRIPT = Path(first_minutes.__file__)
TRAINER = """
import importlib.util, json, os, struct, sys, time
from pathlib import Path

def main():
    words = dict(word.partition("=")[::2] for word in sys.argv[1:])
    folder, net = Path(words["output"]), words.get("model.name", "prove")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    print(net, words.get("minutes"), "neededthing",
        importlib.util.find_spec("neededthing") is not None, flush=True)
    if net == "prove":
        (folder / "kept.json").write_text("{}")
        (folder / "logs" / "single.log").write_text("step 20")
    if net in os.environ.get("STUCK", "").split():
        time.sleep(600)
    if net in os.environ.get("BROKEN", "").split():
        sys.exit("no " + net)
    checks = [{"part": "fast", "status": "measured", "title": "copies", "line": "3 | 4"}]
    for name in ("proof.json", "proof.md"):
        (folder / name).write_text(json.dumps({"words": words, "checks": checks}))
    graphs = words.get("graphs") == "true"
    way = "replayed" if graphs and net not in os.environ.get("LAUNCHED", "").split() else "launched"
    speed = {"samples_per_sec": 100.0 + 250.0 * graphs, "std": 1.0}
    (folder / "result.json").write_text(json.dumps({"graphs": way, "throughput": speed}))
    weight = 1.0 + 1e-7 * (graphs and net in os.environ.get("DIFFERENT", "").split())
    head = {"__metadata__": {"recipe": str(words)},
        "w": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    head = json.dumps(head).encode()
    written = struct.pack("<Q", len(head)) + head + struct.pack("<f", weight)
    (folder / "last.safetensors").write_bytes(written)
    (folder / "steps.csv").write_text(f"step,seconds,train_loss\\n1,{time.time()},0.5\\n")

if __name__ == "__main__":
    main()
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
    """Return a copy of the project with stand-ins, and a folder with wheels of a missing and of an
    installed package.
    """
    project = tmp_path / "project"
    wheels = tmp_path / "wheels"
    for path, text in {
        "trainer/__init__.py": "",
        "trainer/__main__.py": TRAINER,
        "trainer/commands/prove/proving.py": "class Proving: pass",
        "tests/__init__.py": "",
        "tests/first_minutes.py": SCRIPT.read_text(),
        "tests/test_gpu.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["gpu"]\n',
    }.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    wheels.mkdir()
    for name in ("neededthing", "torch"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{name}/__init__.py", "raise SystemExit('of the wheel')" if name == "torch" else ""
            )
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
    return tmp_path


def start(machine, *words, **variables):
    line = [sys.executable, str(machine / "project" / "tests" / "first_minutes.py")]
    line += ["--wheels", str(machine / "wheels"), "--out", str(machine / "out"), *words]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        line,
        cwd=machine,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hurry(machine):
    """Allow 4 seconds for a run, and one for its end."""
    script = machine / "project" / "tests" / "first_minutes.py"
    quick = script.read_text()
    for slow, fast in {
        "GRACE = 5.0, 0.2, 10.0": "GRACE = 1.0, 0.1, 1.0",
        "else 75.0": "else 4.0",
    }.items():
        assert quick.count(slow) == 1
        quick = quick.replace(slow, fast)
    script.write_text(quick)


def rows(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.full("many processes, one after the other")
def test_the_whole_trip(machine):
    parts = [word for part in ("graphs", "pipeline", "tests", "prove") for word in ("--only", part)]
    trip = start(machine, "--seconds", "120", *parts, "devices=[cpu,cpu]")
    output, _ = trip.communicate(timeout=120)
    assert trip.returncode == 0, output
    out = machine / "out"
    assert {path.name for path in out.iterdir()} == {
        *("proof.json", "proof.md", "kept.json", "parts.log", "logs.tar.gz"),
        *("results.jsonl", "results.md"),
    }
    words = json.loads((out / "proof.json").read_text())["words"]
    assert words["devices"] == "[cpu,cpu]" and 1 < float(words["minutes"]) < 2
    assert "neededthing True" in (out / "parts.log").read_text(), (
        "what is missing came with a wheel"
    )
    assert not (machine / "runs" / "first_minutes" / "wheels" / "torch").exists(), (
        "what is installed stays as it is"
    )
    assert "1 passed, 1 deselected" in (out / "parts.log").read_text()
    table_rows = rows(out)
    assert [row["figure"][:4] for row in table_rows if row["part"] == "graphs"] == [
        figure
        for net in first_minutes.NETS
        for figure in (["equa", "3.50"] if net.exact else ["3.50"])
    ]
    assert [row["figure"][:4] for row in table_rows if row["part"] == "pipeline"] == [
        "1.00",
        "1.00",
    ]
    table = [
        line.split(" | ")
        for line in (out / "results.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert {len(cells) for cells in table} == {3}
    assert len(table) == len(table_rows) + 2
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert "single.log" in archive.getnames() and "000-launched.log" in archive.getnames()


@pytest.mark.full("many processes, one after the other")
def test_wrong_or_hanging_parts_are_reported_and_the_others_run(machine):
    hurry(machine)
    words = ["--seconds", "90", "--only", "graphs", "--only", "tests"]
    trip = start(
        machine,
        *words,
        DIFFERENT="resnet20",
        STUCK="resnet50",
        BROKEN="fast_cnn",
        LAUNCHED="vit_b_16",
    )
    output, _ = trip.communicate(timeout=120)
    assert trip.returncode == 1, output
    table_rows = rows(machine / "out")
    assert [row["right"] for row in table_rows] == [
        False,
        True,
        *[None] * 6,
        False,
        False,
        False,
        True,
    ]
    assert (
        table_rows[0]["differ"] == ["last.safetensors w"] and "DIFFERENT" in table_rows[0]["figure"]
    )
    assert "no fast_cnn" in table_rows[8]["figure"]
    assert all("graphs were: launched, launched" in row["figure"] for row in table_rows[9:11]), (
        "nothing was replayed"
    )


@pytest.mark.full("many processes, one after the other")
def test_the_trip_ends_in_time_with_the_finished_parts(machine):
    hurry(machine)
    words = ["--seconds", "14", "--only", "graphs", "--only", "prove"]
    trip = start(machine, *words, STUCK="resnet20 resnet50 fast_cnn vit_b_16 prove")
    output, _ = trip.communicate(timeout=60)
    assert trip.returncode == 124, output
    assert (machine / "out" / "kept.json").exists()
    figures = [row["figure"] for row in rows(machine / "out")]
    assert figures[0] == figures[-1] == f"FAILED: {first_minutes.LATE}"
    assert figures[-2] == "not reached"


@pytest.mark.slow(cases=["9"])
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_an_interrupted_trip_has_the_finished_parts(number, machine):
    trip = start(machine, "--only", "prove", STUCK="prove")
    end = time.monotonic() + 60
    while not (machine / "out" / "kept.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    trip.send_signal(number)
    trip.communicate(timeout=60)
    assert {"kept.json", "parts.log"} <= {path.name for path in (machine / "out").iterdir()}
    assert "minutes=" in (machine / "out" / "parts.log").read_text()


@pytest.mark.parametrize(
    "net", [*first_minutes.NETS, *first_minutes.TINY], ids=lambda net: net.title
)
def test_words_of_its_runs_are_words_of_recipes(net):
    assert (
        load(None, *net.run_of(12, *first_minutes.COMPARED.split(), "mode=single")).batch_size
        == net.batch
    )


@pytest.mark.slow
def test_runs_that_differ_in_a_bit_differ_and_equal_ones_do_not(tmp_path):
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "max_steps=4",
        *first_minutes.COMPARED.split(),
    ]
    for name, lr in {"a": "0.001", "b": "0.001", "c": "0.00101"}.items():
        ok(*words, "save.every_steps=2", f"optimizer.lr={lr}", f"output={tmp_path / name}")
    differ, count = first_minutes.differences(tmp_path / "a", tmp_path / "b")
    assert differ == [] and count > 20 and result(tmp_path / "a")["steps"] == 4
    differ, _ = first_minutes.differences(tmp_path / "a", tmp_path / "c")
    kinds = {name.split("/")[-1].split(".")[0] for name in differ}
    assert {"last", "model", "ema"} <= kinds and any(name.startswith("step ") for name in differ)


@pytest.mark.full("two minutes")
def test_a_try_on_the_cpu_runs_the_real_commands(tmp_path):
    parts = [word for part in ("graphs", "nccl", "pipeline") for word in ("--only", part)]
    line = [
        sys.executable,
        str(SCRIPT),
        "--cpu",
        "--out",
        str(tmp_path / "out"),
        "--seconds",
        "900",
        *parts,
    ]
    completed = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=930
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    table_rows = rows(tmp_path / "out")
    assert [row["part"] for row in table_rows] == ["graphs"] * 4 + ["nccl"] + ["pipeline"] * 2
    for row in (*table_rows[0:4:2], table_rows[4]):
        assert row["right"] is True
        assert re.search(r"\b\d+ tensors\b", row["figure"])

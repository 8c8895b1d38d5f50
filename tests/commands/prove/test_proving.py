"""The command as a whole: machines with a fault are found out, what is done is kept, and nothing passes by default."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import warm
from tests.command_line import PROJECT, environment
from tests.commands.prove.proofs import CHECKS, DEVICES, FAULTY, begin, faulty, found, proof, prove, row
from trainer.commands.prove import proving
from trainer.commands.prove.check_runner import Check, Outcome, measured, right

FAULTS = {  # put in by hand, with the checks that have to see it and what they say
    "few_files": (["doctor"], "only 300 files may be open at once"),
    "wrong_copy": (["copies"], r"\d+ of 24 were wrong: cpu to cpu, by message, 1,048,579 of uint8: element"),
    "wrong_sum": (["sums"], r"\d+ of 24 were wrong: on cpu, 1,023 of uint8: element 5 is"),
    "other_each_time": (["repeat"], "losses, norms, weights, optimizer differ between two equal runs"),
    "repeated_step": (["repeat", "resume"], "differ from the run that was not killed"),
    "other_network": (["mode ddp"], "differs: .*optimizer by "),
    "killed": (["mode ddp"], "rank 1 was killed by SIGKILL"),
    "counted_twice": (["held out ddp"], "not each once: .*sum of numbers .* instead of 3486"),
    "drifting_fp16": (["precision fp16"], "differs: .*optimizer by "),
    "wrong_kernels": (["compile"], "differs: losses by "),
    "leak": (["memory"], r"each run keeps \d+ MiB of the host's memory"),
    "left_behind": (["memory"], "left in /dev/shm: left-by-a-test-"),
    "slow_device": (["rates"], "cpu:1 is slow: its matrix products reach"),
    "throttled": (["rates"], "cpu:1 is throttled: its matrix products fall to"),
    "slow_link": (["links"], "slow from 1 to 0: "),
}
SAMPLE = ("few_files", "counted_twice", "slow_link")  # and wrong_copy, on which it goes on below


def apart(fault):
    return pytest.param([fault], marks=pytest.mark.full("some of fifteen faults in the fast tests"), id=fault)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [SAMPLE, *map(apart, FAULTS)], ids=" ".join)
def test_a_machine_with_faults_is_told(faults, tmp_path):
    folder = begin(tmp_path / "proof", *(name for fault in faults for name in FAULTS[fault][0]))
    done = prove(folder, fault=" ".join(faults), timeout=600)
    for left in Path("/dev/shm").glob("left-by-a-test-*"):
        left.unlink()
    assert done.returncode == 3, done.stdout + done.stderr
    for names, says in map(FAULTS.get, faults):
        row = found(folder, names[-1])
        assert row["status"] == "wrong" and re.search(says, row["line"]), row
        assert row["todo"] and f"try: {row['todo']}" in done.stdout
    assert "WRONG" in done.stdout.splitlines()[-1]
    assert proof(folder)["status"] == "wrong" and "**WRONG**" in (folder / "proof.md").read_text()
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full("the readers are measured for seconds; test_proof.py has the words")
def test_slow_readers_are_the_slow_part(tmp_path):
    rate = {"median": 5000.0, "low": 4900.0, "high": 5100.0}
    figures = {"images_per_sec": rate, "bare_images_per_sec": rate, "ratio": {"median": 1.0}, "times_one": 1.9}
    folder = begin(tmp_path / "proof", "readers", **{"speed resnet20 x2": row("measured", **figures)})
    done = prove(folder, fault="slow_readers")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.search(r"correctly on 2 CPU processes; 1\.9 times as fast as one; .*reading photos \(0\.", last), last
    assert found(folder, "readers")["figures"]["ratio"]["median"] < 0.5  # of torchvision's own


@pytest.mark.slow
def test_a_machine_without_a_fault_is_right(tmp_path, full):
    names = ["copies", "sums", "held out ddp", "links"]
    names += ["repeat", "resume", "mode ddp", "precision fp16", "memory", "rates"] * full
    folder = begin(tmp_path / "proof", *names)
    done = prove(folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("correctly on 2 CPU processes")
    rows = [found(folder, name) for name in names]
    assert {row["status"] for row in rows} <= {"right", "measured"} and all(row["todo"] is None for row in rows)
    assert (folder / "proof.png").stat().st_size > 10_000
    told = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(told) == len(names) and f"/{len(CHECKS)}]" in told[0]
    page = (folder / "proof.md").read_text()
    assert str(tmp_path) not in page and os.path.expanduser("~") not in page


# --- stopped, and gone on with ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("again", [["minutes=60"], ["minutes=0.01"]], ids=["asked again", "no time to ask again"])
def test_a_machine_that_was_found_wrong_stays_wrong_after_a_stop(again, tmp_path, full):
    if again != ["minutes=60"] and not full:
        pytest.skip("one of two ways to go on in the fast tests: --all")
    folder = begin(tmp_path / "proof", "copies", "links")
    words = [sys.executable, "-m", "trainer", "prove", "devices=[cpu,cpu]", f"output={folder}", "minutes=60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = warm.Popen(words, env=environment(**faulty("wrong_copy")), **pipes)
    assert any("WRONG" in line for line in started.stdout)  # read until then
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 143, out + err
    assert (
        proof(folder)["status"] == "wrong" and "links" not in json.loads((folder / proving.KEPT).read_text())["checks"]
    )
    done = prove(folder, *again, fault="wrong_copy")
    assert done.returncode == 3, done.stdout + done.stderr
    assert found(folder, "copies")["status"] == "wrong" and "WRONG" in done.stdout.splitlines()[-1]
    assert (found(folder, "links")["status"] == "left out") == (again == ["minutes=0.01"])


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    done = prove(tmp_path / "mine")
    assert done.returncode == 8 and re.search(r"\bmine .*\boutput=", done.stderr)
    folder = begin(tmp_path / "proof")
    found = json.loads((folder / proving.KEPT).read_text())
    (folder / proving.KEPT).write_text(json.dumps({**found, "asked": {**found["asked"], "machine": "another"}}))
    done = prove(folder)
    assert done.returncode == 8 and re.search(r"\bproof .*\bmachine\b.*\boutput=", done.stderr)


def test_minutes_that_are_too_few_for_anything(tmp_path):
    done = prove(tmp_path / "proof", "minutes=0.01")
    assert done.returncode == 2 and re.search(r"minutes=0\.01 .*type minutes=\d", done.stderr)


# --- what fits --------------------------------------------------------------------------------------------------------


def proving_of(tmp_path, checks, minutes, monkeypatch):
    monkeypatch.setattr(proving.right, "checks", lambda devices: checks)
    monkeypatch.setattr(proving.fast, "checks", lambda devices: [])
    monkeypatch.setattr(proving.fast, "load_libraries", lambda: None)
    return proving.Proving(proving.Kept(tmp_path), DEVICES, minutes)


def test_what_counts_most_is_chosen_first_and_done_in_order(tmp_path, monkeypatch, capsys):
    done, clock = [], [0.0]
    monkeypatch.setattr(proving, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def check(name, seconds, rank, slower=1.0):
        def run(runner):
            done.append(name)
            clock[0] += slower * seconds
            return right("fine")

        return Check(name, "right", name, seconds, run, rank)

    checks = [check("a", 20, 2), check("b", 30, 0), check("c", 25, 1, slower=2), check("d", 100, 0), check("e", 15, 1)]
    one = proving_of(tmp_path, checks, 1.8, monkeypatch)
    one.announce()
    output = capsys.readouterr().out
    assert "4 checks, about 2 minutes" in output and re.search(r"skipped.*minutes=4 .*: d\b", output)
    one.run()
    assert done == ["a", "b", "c"], "the third took twice as long, so that nothing is left for the last"


def test_a_check_that_raises_is_wrong_and_the_next_is_done(tmp_path, monkeypatch, capsys):
    def broken(runner):
        raise ValueError("not a number")

    checks = [
        Check("one", "right", "one", 1, broken),
        Check("two", "fast", "two", 1, lambda runner: measured("3 images/s")),
        Check("three", "right", "three", 1, lambda runner: Outcome("not here", "no compiler")),
    ]
    one = proving_of(tmp_path, checks, 5, monkeypatch)
    one.run()
    assert {name: found.status for name, found in one.runner.outcomes.items()} == {
        "one": "wrong",
        "two": "measured",
        "three": "not here",
    }
    output = capsys.readouterr().out
    assert "[ 1/3] one ... WRONG: ValueError: not a number" in output and "two ... 3 images/s (0 s)" in output
    again = proving_of(tmp_path, checks, 5, monkeypatch)
    assert [check.name for check in again._waiting()] == ["one", "three"], "only what is done well is not done again"


def test_faults_are_found_by_their_names():
    text = (FAULTY / "sitecustomize.py").read_text()
    assert all(f"def {fault}(" in text and f'"{fault}": ' in text for fault in [*FAULTS, "slow_readers"])
    assert PROJECT in FAULTY.parents

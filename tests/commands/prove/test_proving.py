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
from tests.command_line import environment
from tests.commands.prove.proofs import CHECKS, DEVICES, begin, faulty, found, proof, prove
from trainer.commands.prove import proving
from trainer.commands.prove.check_runner import Check, Outcome, measured, right
from trainer.errors import RecipeError

FAULTS = {  # put in by hand, with the checks that have to see it and what they say
    "few_files": (["doctor"], "only 300 files may be open at once"),
    "wrong_copy": (["copies"], r"\d+ of 24 were wrong: cpu to cpu, by message, 1,048,579 of uint8: element"),
    "wrong_sum": (["sums"], r"\d+ of 24 were wrong: on cpu, 1,023 of uint8: element 5 is"),
    "repeated_step": (["repeat", "resume"], "differ from the run that was not killed"),
    "other_network": (["mode ddp"], "differs: .*optimizer by "),
    "counted_twice": (["held out ddp"], "not each once: .*sum of numbers .* instead of 3486"),
    "wrong_kernels": (["compile"], "differs: losses by "),
    "leak": (["memory"], r"each run keeps \d+ MiB of the host's memory"),
    "left_behind": (["memory"], "left in /dev/shm: left-by-a-test-"),
    "slow_link": (["links"], "slow from 1 to 0: "),
}
SAMPLE = ("few_files", "counted_twice", "slow_link")  # and wrong_copy, on which it goes on below


def apart(fault):
    return pytest.param([fault], marks=pytest.mark.full("some of ten faults in the fast tests"), id=fault)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [SAMPLE, *map(apart, FAULTS)], ids=" ".join)
def test_a_machine_with_faults_is_told(faults, tmp_path):
    folder = begin(tmp_path / "proof", *(name for fault in faults for name in FAULTS[fault][0]))
    done = prove(folder, fault=" ".join(faults), timeout=600)
    for left in Path("/dev/shm").glob("left-by-a-test-*") if "left_behind" in faults else ():
        left.unlink()
    assert done.returncode == 3, done.stdout + done.stderr
    for names, says in map(FAULTS.get, faults):
        row = found(folder, names[-1])
        assert row["status"] == "wrong" and re.search(says, row["line"]), row
        assert row["todo"] and f"try: {row['todo']}" in done.stdout
    assert "WRONG" in done.stdout.splitlines()[-1]
    assert proof(folder)["status"] == "wrong" and "**WRONG**" in (folder / "proof.md").read_text()
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_machine_without_a_fault_is_right(tmp_path, full):
    names = ["copies", "sums", "resume", "held out ddp", "links"]
    names += ["doctor", "repeat", "mode ddp", "held out pipeline", "precision fp16", "memory", "rates"] * full
    folder = begin(tmp_path / "proof", *names)
    done = prove(folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("correctly on 2 CPU processes")
    rows = [found(folder, name) for name in names]
    assert {row["status"] for row in rows} <= {"right", "measured"} and all(row["todo"] is None for row in rows)
    told = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(told) == len(names) and f"/{len(CHECKS)}]" in told[0]
    page = (folder / "proof.md").read_text()
    assert str(tmp_path) not in page and os.path.expanduser("~") not in page


# --- stopped, and gone on with ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_machine_that_was_found_wrong_stays_wrong_after_a_stop(tmp_path):
    folder = begin(tmp_path / "proof", "copies", "links")
    words = [sys.executable, "-m", "trainer", "prove", "devices=[cpu,cpu]", f"output={folder}", "minutes=60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = warm.Popen(words, env=environment(**faulty("wrong_copy")), **pipes)
    assert any("WRONG" in line for line in started.stdout)  # read until then
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 143, out + err
    kept = json.loads((folder / proving.KEPT).read_text())["checks"]
    assert proof(folder)["status"] == "wrong" and "links" not in kept
    for minutes, left in (("0.01", "left out"), ("60", "measured")):
        done = prove(folder, f"minutes={minutes}", fault="wrong_copy")
        assert done.returncode == 3, done.stdout + done.stderr
        assert found(folder, "copies")["status"] == "wrong" and "WRONG" in done.stdout.splitlines()[-1]
        assert found(folder, "links")["status"] == left


# --- what fits --------------------------------------------------------------------------------------------------------


def proving_of(tmp_path, checks, minutes, monkeypatch):
    monkeypatch.setattr(proving.right, "checks", lambda devices: checks)
    monkeypatch.setattr(proving.fast, "checks", lambda devices: [])
    return proving.Proving(tmp_path, DEVICES, minutes)


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
    with pytest.raises(RecipeError, match=r"minutes=0\.01 .*type minutes=4"):
        proving_of(tmp_path, checks, 0.01, monkeypatch).announce()
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
    assert [found.status for found in one.runner.outcomes.values()] == ["wrong", "measured", "not here"]
    output = capsys.readouterr().out
    assert "[ 1/3] one ... WRONG: ValueError: not a number" in output and "two ... 3 images/s (0 s)" in output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / proving.KEPT).write_text('{"checks": {"one": {"status": "right"}}}')
    assert proving.kept(tmp_path / "other") == {}, "what is damaged is done again"
    again = proving_of(tmp_path, checks, 5, monkeypatch)
    assert again.outcomes == one.outcomes, "they come back as they were"
    assert [check.name for check in again._waiting()] == ["one", "three"], "only what is done well is not done again"


def test_what_a_proof_is_bound_to_names_nobody_and_changes_with_what_is_installed():
    bound = ({"cpu": "AMD", "gpus": []}, {"torch": "2.11"}, ("cpu", "cpu"))
    found = proving.bound_to(*bound)
    assert found["devices"] == "cpu,cpu" and os.uname().nodename not in json.dumps(found).split('"')
    for place, (key, other) in enumerate({"machine": {"cpu": "Intel"}, "versions": {}, "devices": ("cpu",)}.items()):
        again = proving.bound_to(*bound[:place], other, *bound[place + 1 :])
        assert [name for name in found if again[name] != found[name]] == [key]

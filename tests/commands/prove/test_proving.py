"""The command as a whole: machines with a fault are found out, what is done is kept, and nothing passes by default; and
proof.json and proof.md: the last sentence, the keys, what was not done, and that nobody is named."""

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import warm
from tests.command_line import environment
from tests.commands.prove.proofs import CARD, CHECKS, DEVICES, begin, faulty, found, machine, proof, prove
from tests.pages import GUIDE
from trainer.commands.prove import fast, proving, right
from trainer.commands.prove.check_runner import Check, CheckRunner, Outcome, measured, wrong
from trainer.commands.prove.check_runner import right as is_right
from trainer.commands.prove.proving import anonymous, markdown, proof_of
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
            return is_right("fine")

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


# --- the proof --------------------------------------------------------------------------------------------------------

GPUS, CPUS = machine("cuda", 4), machine("cpu", 2)
MACHINE = {"cpu": "AMD EPYC", "cores": 32, "memory_bytes": 2**38, "gpus": [CARD] * 4, "system": "Linux-6.1"}
SPEED = {"ratio": {"median": 0.99}, "times_one": 3.7, "exposed_communication": 0.06, "step": {"optimizer": 0.02}}


def made(tmp_path, devices=GPUS, **changes):
    """A proof in which all is done and right but for `changes`: name -> Outcome, or None for what is left out."""
    one = CheckRunner(tmp_path, devices)
    checks = [*right.checks(devices), *fast.checks(devices)]
    for check in checks:
        one.outcomes[check.name] = is_right("it is") if check.part == "right" else measured("3 GB/s")
    first = f"speed {fast.NETWORKS[devices.kind][0].name} x{devices.count}"
    one.outcomes[first] = measured("9,000 images/s", **SPEED)
    assert changes.keys() <= one.outcomes.keys()
    one.outcomes = {name: outcome for name, outcome in (one.outcomes | changes).items() if outcome}
    return proof_of(one, checks, 10.0, 0.1, MACHINE, {"torch": "2.11", "cuda": None})


def test_all_right(tmp_path):
    proof = made(tmp_path)
    assert re.search(r"correctly on 4 GPUs; 3\.7 times as fast as one; .*communication \(6% ", proof["sentence"])
    assert (proof["status"], proof["times_one"], proof["format"]) == ("right", 3.7, 1)


def test_one_wrong_is_the_sentence(tmp_path):
    proof = made(tmp_path, sums=wrong("3 of 24 came out wrong", "set NCCL_P2P_DISABLE=1"), copies=wrong("odd", "see"))
    assert proof["status"] == "wrong"
    title = "copies between all pairs of 4 GPUs, by pattern"
    assert "WRONG on 4 GPUs" in proof["sentence"] and f"{title}: odd (and 1 more)" in proof["sentence"]
    page = markdown(proof)
    assert re.search(r"- \*\*sums .*\*\*: 3 of 24 came out wrong\. .*: set NCCL_P2P_DISABLE=1", page)


def test_what_is_left_out_never_counts_as_passed(tmp_path):
    nothing = proof_of(CheckRunner(tmp_path, CPUS), [*right.checks(CPUS)], 1.0, None, MACHINE, {})
    assert nothing["sentence"].startswith("nothing is proven") and nothing["status"] == "incomplete"
    proof = made(tmp_path, CPUS, **{"mode ddp": None, "compile": None})
    total = sum(row["part"] == "right" for row in proof["checks"])
    assert proof["status"] == "incomplete" and proof["counts"]["left out"] == 2
    assert re.match(rf"{total - 2} of {total} checks .*\b2 CPU processes\b.*skipped", proof["sentence"])
    assert f"({len(proof['checks'])} checks in all)" in proof["sentence"]  # as many as the page lists
    left = [row for row in proof["checks"] if row["status"] == "left out"]
    assert [row["name"] for row in left] == ["mode ddp", "compile"] and all(row["line"] for row in left)
    page = markdown(proof)
    assert re.search("Skipped in 10 minutes: .*ddp.*; compile", page)
    assert "| 20 steps of ddp" not in page


def test_what_a_machine_cannot_do_is_no_fault(tmp_path):
    proof = made(tmp_path, compile=Outcome("not here", "no compiler"))
    assert proof["status"] == "right" and "trains correctly on 4 GPUs" in proof["sentence"]
    assert re.search(r"\| compile=true .*\| not here \| no compiler \|", markdown(proof))


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, "communication (6% of a step)"),
        ({"ratio": {"median": 0.7}}, "this software's own loop (0.70 times a bare one)"),
        ({"step": {"optimizer": 0.3}}, "the optimizer (30% of a step)"),
        ({"exposed_communication": None, "times_one": 2.0}, "what the devices share (50% is lost between them)"),
        ({"exposed_communication": 0.01, "times_one": 3.9}, "computing ResNet-50 itself"),
    ],
)
def test_the_slow_part_is_what_costs_most(figures, says, tmp_path):
    assert made(tmp_path, **{"speed resnet50 x4": measured("", **{**SPEED, **figures})})["slow_part"] == says


def test_the_keys_are_those_of_the_guide(tmp_path):
    proof = made(tmp_path)
    assert json.loads(json.dumps(proof, allow_nan=False)) == proof
    table = (GUIDE / "prove.md").read_text().partition("## proof.json")[2]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert keys == [*proof], "an interface: keys are added, never changed"
    row = ["name", "part", "title", "status", "line", "todo", "figures", "seconds"]
    assert all([*found] == row for found in proof["checks"])


def test_the_page_names_nobody_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    line = "nothing goes into /home/ada/a-secret-project: cd; node17: /data/x/y.jpg of ada failed at 3 images/s"
    page = markdown(made(tmp_path, repeat=wrong(line, "cd ~/elsewhere/x")))
    assert not re.search("ada|node17|secret|/home|/data|elsewhere", page), page
    text = "12 images/s of /dev/shm; 3/4 ViT-B/16 at https://github.com/pytorch/pytorch devices=[cuda:0] photos"
    assert anonymous(text) == text and anonymous("(/opt/x.py:12, '~/photos/cat')") == "(PATH:12, 'PATH')"
    assert "goes into PATH: cd; NAME: PATH of NAME failed at 3 images/s" in page

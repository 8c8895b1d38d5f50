"""proof.json and proof.md: the last sentence, the keys, what was not done, and that nobody is named."""

from __future__ import annotations

import getpass
import json
import re
import socket

import pytest

from tests.pages import GUIDE
from trainer.commands.prove import fast, right
from trainer.commands.prove.check_runner import CheckRunner, Devices, Outcome, measured, wrong
from trainer.commands.prove.check_runner import right as is_right
from trainer.commands.prove.proving import anonymous, markdown, proof_of

CARD = "NVIDIA A100-SXM4-80GB"
GPUS = Devices(tuple(f"cuda:{n}" for n in range(4)), "cuda", (CARD,) * 4)
CPUS = Devices(("cpu", "cpu"), "cpu", ("CPU", "CPU"), 1)
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
    for name, outcome in changes.items():
        assert name in one.outcomes, name
        one.outcomes[name] = outcome
        if outcome is None:
            del one.outcomes[name]
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

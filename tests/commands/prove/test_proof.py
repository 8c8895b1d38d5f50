"""proof.json, proof.md and the picture: the last sentence, the keys, what was not done, and that nobody is named."""

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
from trainer.commands.prove.proof_page import anonymous, draw, markdown, proof_of
from trainer.commands.trials.report import MachineFigures

CARD = "NVIDIA A100-SXM4-80GB"
GPUS = Devices(tuple(f"cuda:{n}" for n in range(4)), "cuda", (CARD,) * 4)
CPUS = Devices(("cpu", "cpu"), "cpu", ("CPU", "CPU"), 1)
MACHINE = MachineFigures("AMD EPYC", 32, 2**38, [CARD] * 4, "Linux-6.1")
SPEED = {
    "images_per_sec": {"median": 9000.0, "low": 8900.0, "high": 9100.0},
    "bare_images_per_sec": {"median": 9100.0, "low": 9000.0, "high": 9200.0},
    "ratio": {"median": 0.99},
    "times_one": 3.7,
    "exposed_communication": 0.06,
    "step": {"optimizer": 0.02},
    "beside_others": [{"images_per_sec": 16621, "what": "AMP", "source": "https://x/y/z", "share": 0.5}],
}


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
    fast_ones = sum(row["part"] == "fast" for row in proof["checks"])
    assert proof["counts"] == {"measured": fast_ones, "right": len(proof["checks"]) - fast_ones}


def test_one_wrong_is_the_sentence(tmp_path):
    proof = made(tmp_path, sums=wrong("3 of 24 came out wrong", "set NCCL_P2P_DISABLE=1"), copies=wrong("odd", "see"))
    assert proof["status"] == "wrong"
    title = "copies between all pairs of 4 GPUs, by pattern"
    assert "WRONG on 4 GPUs" in proof["sentence"] and f"{title}: odd (and 1 more)" in proof["sentence"]
    page = markdown(proof)
    assert re.search(r"- \*\*sums .*\*\*: 3 of 24 came out wrong\. .*: set NCCL_P2P_DISABLE=1", page)


def test_what_is_left_out_never_counts_as_passed(tmp_path):
    proof = made(tmp_path, CPUS, **{"mode ddp": None, "memory": None})
    total = sum(row["part"] == "right" for row in proof["checks"])
    assert proof["status"] == "incomplete" and proof["counts"]["left out"] == 2
    assert re.match(rf"{total - 2} of {total} checks .*\b2 CPU processes\b.*skipped", proof["sentence"])
    left = [row for row in proof["checks"] if row["status"] == "left out"]
    assert [row["name"] for row in left] == ["mode ddp", "memory"] and all(row["line"] for row in left)
    page = markdown(proof)
    assert re.search("Skipped in 10 minutes: .*ddp.*; memory", page)
    assert "| 20 steps of ddp" not in page


def test_nothing_done_is_nothing_proven(tmp_path):
    one, checks = CheckRunner(tmp_path, CPUS), [*right.checks(CPUS)]
    proof = proof_of(one, checks, 1.0, None, MACHINE, {})
    assert proof["sentence"].startswith("nothing is proven") and proof["status"] == "incomplete"


def test_what_a_machine_cannot_do_is_no_fault_and_no_pass(tmp_path):
    proof = made(tmp_path, compile=Outcome("not here", "no compiler"))
    assert proof["status"] == "right" and "trains correctly on 4 GPUs" in proof["sentence"]
    assert re.search(r"\| compile=true .*\| not here \| no compiler \|", markdown(proof))


@pytest.mark.parametrize(
    ("figures", "share", "says"),
    [
        ({}, 2.0, "communication (6% of a step)"),
        ({"ratio": {"median": 0.7}}, 2.0, "this software's own loop (0.70 times a bare one)"),
        ({}, 0.4, "reading photos (0.4 times what ResNet-50 takes)"),
        ({"step": {"optimizer": 0.3}}, 2.0, "the optimizer (30% of a step)"),
        ({"exposed_communication": None, "times_one": 2.0}, 2.0, "what the devices share (50% is lost between them)"),
        ({"exposed_communication": 0.01, "times_one": 3.9}, 2.0, "computing ResNet-50 itself"),
    ],
)
def test_the_slow_part_is_what_costs_most(figures, share, says, tmp_path):
    changes = {"speed resnet50 x4": measured("", **{**SPEED, **figures})}
    changes["readers"] = measured("", share_of_what_the_network_takes=share)
    assert made(tmp_path, **changes)["slow_part"] == says


def test_the_keys_are_those_of_the_guide(tmp_path):
    proof = made(tmp_path)
    assert json.loads(json.dumps(proof, allow_nan=False)) == proof
    kinds = {
        "format": int, "status": str, "sentence": str, "kind": str, "devices": list, "times_one": float,
        "slow_part": str, "counts": dict, "checks": list, "minutes": float, "seconds": float, "date": str,
        "busy_cores": float, "machine": dict, "versions": dict,
    }  # fmt: skip
    assert {key: type(value) for key, value in proof.items()} == kinds, "an interface: keys are added, never changed"
    table = (GUIDE / "prove.md").read_text().partition("## proof.json")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(proof)
    rows = proof["checks"]
    assert {key for row in rows for key in row} == {
        "name", "part", "title", "status", "line", "todo", "seconds", "figures",
    }  # fmt: skip
    assert re.search(r"\| .*\bddp\b.* \| right \| it is \|", markdown(proof))


def test_the_page_names_nobody_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    line = (
        "nothing can be written into /home/ada/a-secret-project: cd; node17: /data/x/y.jpg of ada failed at 3 images/s"
    )
    page = markdown(made(tmp_path, doctor=wrong(line, "cd ~/elsewhere/x")))
    assert not re.search("ada|node17|secret|/home|/data|elsewhere", page), page
    assert "written into PATH: cd; NAME: PATH of NAME failed at 3 images/s" in page
    assert "https://x/y/z" in page, "a source stays"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("12 images/s; /dev/shm is too small; and/or 3/4", True),
        ("https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch", True),
        ("devices=[cuda:0,cuda:1] data.root=photos", True),
        ("ResNet-50 and ViT-B/16 on 2 GPUs", True),
        ("(/opt/venv/lib/x.py:12, in f)", False),
        ("'~/photos/cat'", False),
    ],
)
def test_what_looks_like_a_path(text, same):
    assert (anonymous(text) == text) is same


@pytest.mark.parametrize("changes", [{}, {"sums": wrong("odd", "see")}, {"memory": None, "speed resnet50 x4": None}])
def test_the_picture_is_drawn_of_any_proof(changes, tmp_path):
    from PIL import Image

    draw(tmp_path / "proof.png", made(tmp_path, **changes))
    with Image.open(tmp_path / "proof.png") as picture:
        assert picture.mode == "RGBA" and picture.width > 1000 and picture.height > 600
        assert picture.getpixel((2, 2))[3] == 0, "it lies on any ground"


def test_a_slow_device_alone_is_wrong_too(tmp_path):
    proof = made(tmp_path, rates=wrong("cuda:1 is slow", "leave it out"))
    assert proof["status"] == "wrong" and "cuda:1 is slow" in proof["sentence"]

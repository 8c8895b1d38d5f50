"""A plan for people."""

import json
import re

import pytest

from tests.commands.plan.plans import fixed_speed
from trainer.__main__ import answer


def page(capsys, *words):
    assert answer(["plan", *words]) == 0
    found = capsys.readouterr().out
    assert all(len(line) <= 120 for line in found.splitlines())
    return found


@pytest.mark.slow
def test_the_page(capsys):
    found = page(capsys, "recipe=digits", "devices=[cpu]", "nproc=2", "memory=4MiB", "bandwidth=1GB/s")
    for text in ("1,437 training images", "DOES NOT FIT", "accumulate=2", "94,186 parameters", "all-reduce", "hogwild"):
        assert text in found
    assert "to train, with accumulate=2 or" in found
    assert "python -m trainer recipe=digits 'devices=[cpu]' nproc=2\n" in found
    assert "torchrun --nproc_per_node=2 -m trainer recipe=digits" in found
    tight = page(capsys, "recipe=digits", "devices=[cpu]", "mode=single", "memory=100KiB")
    assert "python -m trainer guide memory" in tight and "accumulate=" not in tight


def test_the_page_of_a_pipeline(capsys, monkeypatch):
    fixed_speed(monkeypatch)
    words = ["recipe=digits", "mode=pipeline", "nproc=2", "memory=24GiB", "measured=here"]
    found = page(capsys, *words)
    assert "fits: " in found and re.search(r"ideal bubble \d", found) and "images/s" in found
    assert "mode=pipeline nproc=2\n" in found
    assert answer(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["schedule"] == "1f1b"


@pytest.mark.slow
def test_the_page_of_gpus_that_are_not_here(capsys):
    found = page(capsys, "recipe=resnet50", "model.name=resnet18", "nproc=8", "memory=24GiB", "data.root=/not/here")
    assert "cuda:0 ... cuda:7" in found and "cpu:" not in found
    assert "1.81 GMACs (3.63 GFLOP) per image, forward" in found
    assert re.search(r"^    2\.40 GiB .*\bCUDA\b.*\bNCCL\b", found, re.M)
    rows = {line.split()[0]: line.split() for line in found.splitlines() if line.startswith("  ") and line.split()}
    assert rows["mode"][-3:] == ["a", "step", "bubble"]
    assert rows["ddp"][-3:] == ["78", "MiB", "-"] and rows["split"][-1] == "88%" and rows["pipeline"][-1].endswith("%")
    assert re.search(r"^    hogwild: .*\bCPU\b.*\bGPUs\b", found, re.M)

"""A plan for people."""

import json
import re

import pytest

from tests.commands.plan.plans import fixed_speed
from trainer.__main__ import answer


def page(capsys, *words):
    assert answer(["plan", *words]) == 0
    actual = capsys.readouterr().out
    assert all(len(line) <= 120 for line in actual.splitlines())
    return actual


@pytest.mark.slow
def test_the_page(capsys):
    page_text = page(
        capsys, "recipe=digits", "devices=[cpu]", "nproc=2", "memory=4MiB", "bandwidth=1GB/s"
    )
    for text in (
        "1,437 training images",
        "DOES NOT FIT",
        "accumulate=2",
        "94,186 parameters",
        "all-reduce",
        "hogwild",
    ):
        assert text in page_text
    assert "to train, with accumulate=2 or" in page_text
    assert "python -m trainer recipe=digits 'devices=[cpu]' nproc=2\n" in page_text
    assert "torchrun --standalone --nproc_per_node=2 -m trainer recipe=digits" in page_text
    tight = page(capsys, "recipe=digits", "devices=[cpu]", "mode=single", "memory=100KiB")
    assert "python -m trainer guide memory" in tight and "accumulate=" not in tight


@pytest.mark.slow
def test_the_page_of_a_pipeline(capsys, monkeypatch):
    fixed_speed(monkeypatch)
    words = ["recipe=digits", "mode=pipeline", "nproc=2", "memory=24GiB", "measured=here"]
    page_text = page(capsys, *words)
    assert (
        "fits: " in page_text
        and re.search(r"ideal bubble \d", page_text)
        and "images/s" in page_text
    )
    assert "mode=pipeline nproc=2\n" in page_text
    assert answer(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["schedule"] == "1f1b"


@pytest.mark.slow
def test_the_page_of_gpus_that_are_not_here(capsys):
    page_text = page(
        capsys,
        "recipe=resnet50",
        "model.name=resnet18",
        "nproc=8",
        "memory=24GiB",
        "data.root=/not/here",
    )
    assert "cuda:0 ... cuda:7" in page_text and "cpu:" not in page_text
    assert "1.81 GMACs (3.63 GFLOP) per image, forward" in page_text
    assert re.search(r"^  fits: .*\b21\.60 GiB\b", page_text, re.M)
    rows = {
        line.split()[0]: line.split()
        for line in page_text.splitlines()
        if line.startswith("  ") and line.split()
    }
    assert rows["mode"][-3:] == ["fits", "sent/step", "bubble"]
    assert rows["ddp"][-3:] == ["78", "MiB", "-"]
    assert rows["split"][-1] == "88%"
    assert rows["pipeline"][-1].endswith("%")
    assert re.search(r"^    hogwild: .*\bCPU\b.*\bGPUs\b", page_text, re.M)

"""A plan for people."""

import json
import re

import pytest

from trainer.__main__ import answer
from trainer.modes.pipeline.torch_schedules import SCHEDULES


def test_the_page(capsys):
    assert answer(["plan", "recipe=digits", "devices=[cpu]", "nproc=2", "memory=4MiB", "bandwidth=1GB/s"]) == 0
    page = capsys.readouterr().out
    for text in (
        "1,437 training images",
        "DOES NOT FIT",
        "accumulate=2",
        "to train, with accumulate=2 or",
        "hogwild",
        "94,186 parameters",
        "all-reduce",
    ):
        assert text in page
    assert "python -m trainer recipe=digits 'devices=[cpu]' nproc=2\n" in page
    assert "torchrun --nproc_per_node=2 -m trainer recipe=digits" in page
    assert all(len(line) <= 120 for line in page.splitlines())


def test_the_page_of_a_pipeline(capsys):
    words = ["recipe=digits", "mode=pipeline", "nproc=2", "memory=24GiB"]
    assert answer(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert "fits: " in page and "ideal bubble" in page and [*SCHEDULES][-1] in page
    assert "mode=pipeline nproc=2\n" in page
    assert answer(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["schedule"] == "1f1b"


@pytest.mark.slow
def test_the_page_of_gpus_that_are_not_here(capsys):
    words = ["recipe=resnet50", "model.name=resnet18", "nproc=8", "memory=24GiB", "data.root=/not/here"]
    assert answer(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert "cuda:0 ... cuda:7" in page and "cpu:" not in page
    assert "1.81 GMACs (3.63 GFLOP) per image, forward" in page
    assert re.search(r"^    2\.40 GiB .*\bCUDA\b.*\bNCCL\b", page, re.M)
    assert all(len(line) <= 120 for line in page.splitlines())
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line.startswith("  ") and line.split()}
    assert rows["mode"][-3:] == ["a", "step", "bubble"]
    assert rows["ddp"][-3:] == ["78", "MiB", "-"] and rows["split"][-1] == "88%" and rows["pipeline"][-1].endswith("%")
    assert re.search(r"^    hogwild: .*\bCPU\b.*\bGPUs\b", page, re.M)

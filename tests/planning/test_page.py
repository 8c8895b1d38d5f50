"""A plan for people."""

import json

from trainer.__main__ import answer


def test_the_page(capsys):
    assert answer(["plan", "recipe=digits", "nproc=2", "memory=4MiB", "bandwidth=1GB/s"]) == 0
    page = capsys.readouterr().out
    for text in ("1,437 training images", "DOES NOT FIT", "accumulate=2", "hogwild", "94,186 parameters", "all-reduce"):
        assert text in page
    assert "python -m trainer recipe=digits nproc=2\n" in page
    assert "torchrun --nproc_per_node=2 -m trainer recipe=digits" in page
    assert all(len(line) <= 120 for line in page.splitlines())


def test_the_page_of_a_pipeline(capsys):
    words = ["recipe=digits", "mode=pipeline", "nproc=2", "memory=24GiB"]
    assert answer(["plan", *words]) == 0
    page = capsys.readouterr().out
    assert "fits: " in page and "ideal bubble" in page and "zbv" in page
    assert "mode=pipeline nproc=2\n" in page
    assert answer(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"]["schedule"] == "1f1b"

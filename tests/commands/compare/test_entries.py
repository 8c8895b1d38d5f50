"""Words -> entries."""

from __future__ import annotations

import re

import pytest

from tests.commands.compare.listing import listed
from trainer.commands.compare import entries
from trainer.commands.compare.entries import Sweep, parse_modes, parse_sweep
from trainer.errors import RecipeError
from trainer.recipe import MODES, load


def test_all_modes_run_on_two_cpu_devices(monkeypatch):
    monkeypatch.setattr("trainer.processes.resources.cores", lambda: 4)
    found = listed()
    assert list(found) == list(MODES) and not any(entry.problem for entry in found.values())
    assert {name: (entry.ranks, entry.threads) for name, entry in found.items()} == {
        "single": (1, 4), "dp": (1, 4), "ddp": (2, 2), "split": (1, 4), "pipeline": (1, 4), "fsdp": (2, 2),
        "local_sgd": (2, 2), "hogwild": (2, 2),
    }  # fmt: skip
    assert "devices=[cpu]" in found["single"].words and "devices=[cpu,cpu]" in found["dp"].words
    assert "threads=2" in found["ddp"].words and "nproc=2" in found["ddp"].words


def test_an_entry_has_words_of_its_own():
    modes = ["single", "pipeline nproc=2 pipeline.microbatches=4", "ddp batch_size=64"]
    single, pipeline, ddp = entries.entries("digits", ["devices=[cpu]"], modes, nproc="4")
    assert (single.ranks, pipeline.ranks, ddp.ranks) == (1, 2, 4)
    assert ddp.recipe.batch_size == 64 and pipeline.recipe.pipeline.microbatches == 4


def test_which_entries_there_are():
    assert list(listed("mode=split")) == ["split"]
    assert list(listed("mode=split", sweep="seed:[1,2]")) == ["split seed=1", "split seed=2"]
    assert list(listed(sweep="seed:[1]")) == ["ddp seed=1"]  # the recipe's
    assert list(listed(modes=["single", "single"])) == ["single", "single (2)"]


@pytest.mark.parametrize("text", ["batch_size=32,64", "batch_size:32,64", "batch_size", "nproc=1,2", "seed:[]", ""])
def test_a_sweep_written_otherwise_is_refused_with_what_works(text):
    with pytest.raises(RecipeError, match=rf"sweep={re.escape(text)} .*\[") as caught:
        parse_sweep(text)
    advised = str(caught.value).partition("as in sweep=")[2]
    assert len(parse_sweep(advised).values) == 2


def test_what_cannot_run_here_is_an_entry_with_the_reason():
    found = listed(modes=["single", "ddp batch_size=1"])
    assert found["single"].problem is None
    line, code = found["ddp batch_size=1"].problem
    assert code == 2 and "batch_size=1 " in line and "2 processes" in line


def test_a_sweep_leaves_alone_who_does_not_look_at_its_key():
    found = listed(modes=["single", "pipeline"], sweep="pipeline.split_size:[4,8]")
    assert list(found) == ["single", "pipeline pipeline.split_size=4", "pipeline pipeline.split_size=8"]
    assert [entry.value for entry in found.values()] == [None, 4, 8]
    assert found["pipeline pipeline.split_size=8"].recipe.pipeline.split_size == 8


def test_over_ranks_each_rank_has_the_same_threads(monkeypatch):
    monkeypatch.setattr("trainer.processes.resources.cores", lambda: 4)
    found = entries.entries("digits", [], ["single", "ddp"], Sweep("nproc", [1, 2]))
    assert [(e.name, e.ranks, e.threads) for e in found] == [
        ("single", 1, 2), ("ddp nproc=1", 1, 2), ("ddp nproc=2", 2, 2)
    ]  # fmt: skip
    assert ["nproc=1" in found[1].words, "nproc=2" in found[2].words] == [True, True], "not as many as the machine has"


def test_threads_that_the_user_gives_stay():
    found = listed("threads=1", modes=["single", "ddp"])
    assert [entry.threads for entry in found.values()] == [1, 1] and found["single"].words.count("threads=1") == 1


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("pipeline.split_size:[1,3]", "pipeline.split_size", (1, 3)),
        ("optimizer.lr:[1e-3, 0.1]", "optimizer.lr", ("1e-3", 0.1)),  # YAML 1.1 reads text, the recipe a number
        ("precision:[fp32,bf16]", "precision", ("fp32", "bf16")),
        ("compile:[true,false]", "compile", (True, False)),
        ("augment.crop_scale:[[0.1,1.0],[0.5,1.0]]", "augment.crop_scale", ([0.1, 1.0], [0.5, 1.0])),
    ],
)
def test_a_sweep_of_any_key(text, key, values):
    sweep = parse_sweep(text)
    assert (sweep.key, sweep.values) == (key, [*values])
    assert len({load("digits", sweep.word(value)).to_yaml() for value in values}) == 2


def test_modes_as_a_shell_gives_them():
    assert parse_modes('[single,"pipeline  nproc=2",ddp precision=bf16]') == [
        "single", "pipeline nproc=2", "ddp precision=bf16"
    ]  # fmt: skip
    assert parse_modes("ddp") == ["ddp"]

"""What bounds a step, as a table of measured parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.pages import GUIDE
from tests.typed import odd
from trainer.recipe import load
from trainer.recipe.checks import launched_because
from trainer.telemetry import verdict
from trainer.telemetry.verdict import PARTS, Reading, Setting, StepParts, Verdict, judge, shares

FASTER = ("compile=true", "graphs=true")
RUN = {"steps": 90.0, "start-up": 4.0, "evaluation": 6.0}


def test_shares_add_up_to_one():
    measured = StepParts(1.0, data=0.1, optimizer=0.05, logging=0.05, communication=0.2, bubble=0.25)
    rest = {"communication": 0.2, "optimizer": 0.05, "logging": 0.05}
    parts = shares(measured)
    assert parts == pytest.approx({"data": 0.1, "compute": 0.4, "launches": 0.0, "bubble": 0.2, **rest})
    launching = shares(replace(measured, launches=0.4))
    assert launching == pytest.approx({"data": 0.1, "compute": 0.1, "launches": 0.4, "bubble": 0.1, **rest})
    assert next(iter(parts)) == "data" and sum(parts.values()) == pytest.approx(1)


def test_parts_that_overlap_never_exceed_the_step():
    parts = shares(StepParts(1.0, data=0.8, optimizer=0.5, communication=3.0, launches=2.0))
    assert parts["data"] == 0.8 and parts["optimizer"] == pytest.approx(0.2) and parts["compute"] == 0
    assert sum(parts.values()) == pytest.approx(1)


LINKS = StepParts(1, communication=0.4)
CUTS = "mode=pipeline pipeline.cuts=[a] pipeline.microbatches=4"
AUTO = ["pipeline.cuts=auto", "pipeline.microbatches=auto"]
SELDOM = "mode=local_sgd local_sgd.every=20"


@pytest.mark.parametrize(
    ("words", "measured", "setting", "bound", "overrides"),
    [
        ("mode=single", StepParts(1, data=0.61), Setting(cores=8, workers=4), "data", ["data.workers=8"]),
        ("mode=single", StepParts(1, data=0.61), Setting(cores=8, workers=8), "data", ["data.workers=16"]),
        ("mode=single", StepParts(1, data=0.61), Setting(cores=8, workers=16), "data", []),
        ("mode=single augment.auto=rand", StepParts(1, data=0.5), Setting(), "data", ["augment.auto=none"]),
        ("mode=single", StepParts(1, data=0.5), Setting(), "data", ["batch_size=256"]),
        ("mode=ddp", LINKS, Setting(4), "communication", ["batch_size=256", "ddp.compress=bf16", SELDOM]),
        ("mode=ddp ddp.compress=bf16", LINKS, Setting(4), "communication", ["batch_size=256"]),
        ("mode=fsdp", LINKS, Setting(4), "communication", ["batch_size=256", SELDOM]),
        ("mode=local_sgd local_sgd.every=4", LINKS, Setting(4), "communication", ["local_sgd.every=8"]),
        (CUTS, StepParts(1, bubble=0.4, busy=[0.2, 1.0]), Setting(2), "bubble", AUTO),
        (CUTS, StepParts(1, bubble=0.4, busy=[0.6, 0.6]), Setting(2), "bubble", AUTO[::-1]),
        ("mode=pipeline", StepParts(1, bubble=0.3), Setting(2), "bubble", ["batch_size=256", "mode=ddp"]),
        ("mode=split", StepParts(1, bubble=0.5), Setting(), "bubble", ["mode=pipeline"]),
        ("mode=pipeline", StepParts(1, bubble=0.3), Setting(2, images=200), "bubble", ["mode=ddp"]),
        ("ema=0.9", StepParts(1, optimizer=0.4), Setting(), "optimizer", ["batch_size=256", "ema=null"]),
        ("logging.every_steps=1", StepParts(1, logging=0.4), Setting(), "logging", ["logging.every_steps=10"]),
        ("mode=single", StepParts(1, data=0.1), Setting(), "compute", []),
        (
            "mode=single channels_last=false",
            StepParts(1),
            Setting(gpu=True),
            "compute",
            ["channels_last=true", "precision=bf16", "compile=true"],
        ),
        ("mode=dp", StepParts(1), Setting(gpu=True), "compute", ["precision=bf16"]),  # dp refuses compile
    ],
)
def test_bound_and_what_to_try(words, measured, setting, bound, overrides):
    found = judge(measured, RUN, load(None, *words.split()), setting)
    assert (found.bound, list(found.overrides)) == (bound, overrides)
    assert all(word in found.sentence for word in overrides)
    assert "try" in found.sentence.lower() or not overrides
    assert f"{found.step[bound]:.0%}" in found.sentence


def test_sentences():
    def said(measured, setting=None, words=("mode=single",), run=RUN):
        return judge(measured, run, load(None, *words), setting or Setting()).sentence

    assert re.fullmatch(r"61% .*images.* data\.workers=8", said(StepParts(1, data=0.61), Setting(cores=8, workers=4)))
    uneven = said(StepParts(1, bubble=0.4, busy=[0.2, 1.0]), Setting(2), ("mode=pipeline", "pipeline.cuts=[a]"))
    assert re.fullmatch(r"40% .*\bidle\b.*\bstage 1 .*\b1\.7 times .*pipeline\.cuts=auto", uneven)
    assert re.search(r"\b25% .*\bevaluation .*\b75%$", said(StepParts(1), run={"steps": 2.0, "evaluation": 6.0}))


@pytest.mark.parametrize(
    ("bubble", "most", "bound", "overrides"),
    [
        (0.1, 0.13, "compute", ["channels_last=true", "precision=bf16"]),
        (0.1, 0.25, "compute", ["channels_last=true", "precision=bf16"]),
        (0.1, 0.6, "compute", ["batch_size=256"]),  # faster arithmetic would not be felt
        (0.3, 0.7, "bubble", ["batch_size=256", "mode=ddp"]),
    ],
)
def test_a_bubble_that_may_be_larger_is_not_taken_for_certain(bubble, most, bound, overrides):
    recipe = load(None, "mode=pipeline", "channels_last=false")
    found = judge(StepParts(1, bubble=bubble, bubble_at_most=most), RUN, recipe, Setting(2, gpu=True))
    assert (found.bound, [word for word in found.overrides if word not in FASTER]) == (bound, overrides)
    assert ("compile=true" in found.overrides) == (bound == "compute" and most - bubble < 0.5), "arithmetic bounds it"
    assert ("computing" in found.sentence) == (bound == "compute" and most - bubble < 0.5)
    told = f"up to {most - bubble:.0%} of the step more may be idle"
    assert (told in found.sentence and told in (found.unmeasured or "")) == (most > 0.2)
    assert found.unmeasured or most < 0.2
    by_hand = recipe.replace(pipeline__microbatches=8)
    asked = judge(StepParts(1, bubble=bubble, bubble_at_most=most), RUN, by_hand, Setting(2, gpu=True))
    assert (asked.overrides[0] == "pipeline.microbatches=auto") == (most > 0.5)
    assert sum(found.step.values()) == pytest.approx(1)


GPU = Setting(gpu=True, may_replay=True)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "split", "pipeline", "fsdp", "local_sgd"])
def test_a_gpu_that_waits_for_python_is_told(mode):
    """With what makes fewer launches, or costs none; faster arithmetic would not be felt."""
    recipe, setting = load(None, f"mode={mode}", "channels_last=false"), replace(GPU, processes=2)
    setting = replace(setting, processes=1) if recipe.traits.processes == "one" else setting
    found = judge(StepParts(1, launches=0.67, optimizer=0.05), RUN, recipe, setting)
    assert found.bound == "launches" and found.step["launches"] == 0.67 and found.step["compute"] == pytest.approx(0.28)
    assert re.search(r"^the GPU waits at least 67% .*Python", found.sentence) and found.unmeasured is None
    may = launched_because(recipe.replace(graphs=True), setting.processes) is None
    assert found.overrides == ["graphs=true"] * may + ["batch_size=256"] and may >= (mode in ("single", "ddp"))
    assert "computing" not in found.sentence


def test_graphs_are_advised_where_the_recipe_can_have_them(monkeypatch):
    tried = []
    monkeypatch.setattr(verdict, "possible", lambda words, *_: tried.extend(words) or list(words))
    for parts in (StepParts(1, launches=0.5), StepParts(1, launches_at_most=0.5)):
        assert judge(parts, RUN, load(None), GPU).overrides[0] == "graphs=true" and "graphs=true" in tried
    for parts in (StepParts(1), StepParts(1, launches_at_most=0.1), StepParts(1, data=0.4, launches=0.3)):
        assert "graphs=true" not in judge(parts, RUN, load(None), GPU).overrides
    decided = replace(GPU, may_replay=False)  # they are replayed, or cannot be
    assert judge(StepParts(1, launches=0.5), RUN, load(None), decided).overrides == ["batch_size=256"]


def test_graphs_come_first_where_launches_may_be_most_of_a_pipelines_bubble():
    recipe = load(None, "mode=pipeline")
    for most, setting, first in (
        (0.3, GPU, True),
        (0.1, GPU, False),
        (0.3, replace(GPU, may_replay=False), False),
        (0.3, replace(GPU, processes=2), False),
        (0.3, Setting(may_replay=True), False),
    ):
        tried = judge(StepParts(1, bubble=0.4, launches_at_most=most), RUN, recipe, setting)
        assert tried.bound == "bubble" and (tried.overrides[:1] == ["graphs=true"]) == first, (most, setting)
        assert "batch_size=256" in tried.overrides


def test_launches_that_were_not_measured_are_no_computing():
    found = judge(StepParts(1, optimizer=0.1, launches_at_most=0.95), RUN, load(None, "mode=single"), GPU)
    assert found.bound == "compute" and "computing" not in found.sentence and "up to 95% " in found.sentence
    assert "up to 95% " in (found.unmeasured or "")
    assert found.overrides == ["graphs=true", "batch_size=256"]
    muon = judge(StepParts(1, optimizer=0.43, launches_at_most=0.95), RUN, load(None, "mode=single"), GPU)
    assert muon.bound == "optimizer" and "up to 95% " in muon.sentence
    few = judge(StepParts(1, launches_at_most=0.1), RUN, load(None, "mode=single"), GPU)
    assert "computing" in few.sentence and "up to 10% " in few.sentence and "compile=true" in few.overrides
    none = judge(StepParts(1, launches_at_most=0.04), RUN, load(None, "mode=single"), GPU)
    assert "up to" not in none.sentence and none.unmeasured is None


def test_what_could_not_be_measured_is_said():
    recipe = load(None, "mode=ddp")
    short = judge(StepParts(1, communication=None), RUN, recipe, Setting(2))
    assert short.bound == "compute" and "communication" in short.sentence
    most = judge(StepParts(1, communication=0.3, at_most=True), RUN, recipe, Setting(2))
    assert most.bound == "compute" and re.search(r"\b30% .*communication", most.sentence)
    assert most.step["communication"] == 0
    more = judge(StepParts(1, optimizer=0.15, communication=0.97, at_most=True), RUN, recipe, Setting(2))
    assert "up to 85% " in (more.unmeasured or "")  # never more than is not known


@pytest.mark.parametrize(("mode", "cure"), [("ddp", "longer run"), ("fsdp", "overlap")])
def test_where_most_of_computing_may_be_communication_one_line_says_what_is_known(mode, cure):
    recipe = load(None, f"mode={mode}")
    found = judge(StepParts(1, optimizer=0.06, communication=2.0, at_most=True), RUN, recipe, Setting(2))
    assert re.fullmatch(rf"94% .*computing and communication\b.*{cure}.*", found.sentence), found.sentence
    assert "up to" not in found.sentence and found.bound == "compute" and found.step["communication"] == 0
    less = judge(StepParts(1, optimizer=0.06, communication=0.46, at_most=True), RUN, recipe, Setting(2))
    assert ("46% is communication" if mode == "fsdp" else "up to 46% ") in less.sentence
    assert ("too short" in f"{less.sentence} {less.unmeasured}") == (mode == "ddp"), "of fsdp no run measures it"
    setting = Setting(2, gpu=True)
    for communication in (0.1, 0.9):  # whatever the sentence is, it tells what its advice is about
        told = judge(StepParts(1, communication=communication, at_most=True, launches=0.0), RUN, recipe, setting)
        advised = any(word.startswith("batch_size=") for word in told.overrides)
        assert ("images of a batch" in told.sentence) == advised, told


MANY = {
    "rank 1": "rank 1 was slower", "learning rate": "the rate still rises", "cores": "others kept the cores",
}  # fmt: skip


def test_each_advice_is_a_line_and_what_matters_most_is_the_first():
    def said(recipe="mode=ddp", run=RUN, **warnings):
        found = judge(StepParts(1, communication=0.3, at_most=True), run, load(None, recipe), Setting(2), 0, warnings)
        return found.sentence.splitlines()

    brief = {"steps": 1.0, "start-up": 4.0}
    first, *machine, step, short = said(run=brief, **MANY)
    assert first == MANY["learning rate"] and machine == [MANY["rank 1"], MANY["cores"]]
    assert "100% of the step" in step and "try" not in step
    assert "too short" in short and all(word in short for word in ("30%", "start-up", "80%"))
    assert len(said()) == 2 and len(said("mode=single")) == 2, "the step, and what the run is too short for"
    _, apart = judge(StepParts(1), {"steps": 2.0, "evaluation": 6.0}, load(None), Setting()).sentence.splitlines()
    assert "evaluation" in apart and "too short" not in apart


def test_where_others_keep_the_cores_nothing_is_tried():
    def said(warnings):
        return judge(StepParts(1, data=0.6), RUN, load(None, "mode=single"), Setting(cores=8, workers=4), 0, warnings)

    assert "data.workers=8" in said({}).sentence and "data.workers=8" not in said({"cores": "busy"}).sentence
    assert said({"cores": "busy"}).overrides == said({}).overrides


def test_the_guide_names_the_parts_of_a_step():
    table = (GUIDE / "speed.md").read_text().partition("| part | what it is |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \| [a-z]", table, re.M) == [*PARTS]


def test_written_forms():
    found = judge(StepParts(0.25, data=0.1), RUN, load(None), Setting(), probe_seconds=0.02)
    assert odd(found.to_dict(), Verdict) == [] and (*found.step,) == PARTS
    assert found.to_dict()["run"] == pytest.approx({"steps": 0.9, "start-up": 0.04, "evaluation": 0.06})


@pytest.mark.parametrize(
    ("cached", "words", "told"),
    [
        (1.0, (), "try data.cache=disk (2.0 times the images/s) or data.workers=4"),  # no more than without waiting
        (7.0, (), "try data.cache=disk (1.4 times the images/s) or data.workers=4"),
        (9.0, (), "try data.workers=4"),
        (1.0, ("data.cache=disk",), "try data.workers=4"),
    ],
)
def test_a_step_that_waits_for_photos_tells_what_readers_do(cached, words, told):
    setting = Setting(cores=2, workers=2, reading=Reading(1.0, 6.0, 3.0, cached))
    found = judge(StepParts(1.0, data=0.5), RUN, load(None, "mode=single", *words), setting)
    assert re.search(r"^50% .*\b10% .*reading.*\b60% .*decoding.*\b30% .*transforming", found.sentence)
    assert found.sentence.endswith(f". T{told[1:]}")
    assert found.to_dict()["reading"] == {"read": 1.0, "decode": 6.0, "transform": 3.0, "cached": cached}

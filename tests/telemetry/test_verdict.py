"""The limit of a step's speed, as a table of measured times."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.checks import odd
from tests.pages import GUIDE
from trainer.recipe import TRAITS, load
from trainer.recipe.checks import explain_eager_steps
from trainer.telemetry import verdict
from trainer.telemetry.verdict import (
    PARTS,
    Reading,
    Setting,
    StepParts,
    Verdict,
    compute_shares,
    judge,
)

FASTER = ("compile=true", "graphs=true")
RUN = {"steps": 90.0, "start-up": 4.0, "evaluation": 6.0}


def test_shares_add_up_to_one():
    measured = StepParts(
        1.0, data=0.1, optimizer=0.05, logging=0.05, communication=0.2, bubble=0.25
    )
    rest = {"communication": 0.2, "optimizer": 0.05, "logging": 0.05}
    parts = compute_shares(measured)
    assert parts == pytest.approx(
        {"data": 0.1, "compute": 0.4, "launches": 0.0, "bubble": 0.2, **rest}
    )
    launching = compute_shares(replace(measured, launches=0.4))
    assert launching == pytest.approx(
        {"data": 0.1, "compute": 0.1, "launches": 0.4, "bubble": 0.1, **rest}
    )
    assert next(iter(parts)) == "data"
    assert sum(parts.values()) == pytest.approx(1)


def test_parts_that_overlap_never_exceed_the_step():
    parts = compute_shares(
        StepParts(
            1.0,
            data=0.8,
            optimizer=0.5,
            communication=3.0,
            launches=2.0,
        )
    )
    assert parts["data"] == 0.8
    assert parts["optimizer"] == pytest.approx(0.2)
    assert parts["compute"] == 0
    assert sum(parts.values()) == pytest.approx(1)


LINKS = StepParts(1, communication=0.4)
CUTS = "mode=pipeline pipeline.cuts=[a] pipeline.microbatches=4"
AUTO = ["pipeline.cuts=auto", "pipeline.microbatches=auto"]
SELDOM = "mode=local_sgd local_sgd.every=20"


@pytest.mark.parametrize(
    ("words", "measured", "setting", "bound", "overrides"),
    [
        (
            "mode=single",
            StepParts(1, data=0.61),
            Setting(cores=8, workers=4),
            "data",
            ["data.workers=8"],
        ),
        (
            "mode=single",
            StepParts(1, data=0.61),
            Setting(cores=8, workers=8),
            "data",
            ["data.workers=16"],
        ),
        ("mode=single", StepParts(1, data=0.61), Setting(cores=8, workers=16), "data", []),
        (
            "mode=single augment.auto=rand",
            StepParts(1, data=0.5),
            Setting(),
            "data",
            ["augment.auto=none"],
        ),
        ("mode=single", StepParts(1, data=0.5), Setting(), "data", ["batch_size=256"]),
        (
            "mode=ddp",
            LINKS,
            Setting(4),
            "communication",
            ["batch_size=256", "ddp.compress=bf16", SELDOM],
        ),
        (
            "mode=ddp ddp.compress=bf16",
            LINKS,
            Setting(4),
            "communication",
            ["batch_size=256", SELDOM],
        ),
        ("mode=fsdp", LINKS, Setting(4), "communication", ["batch_size=256", SELDOM]),
        (
            "mode=local_sgd local_sgd.every=4",
            LINKS,
            Setting(4),
            "communication",
            ["local_sgd.every=8"],
        ),
        (CUTS, StepParts(1, bubble=0.4, busy=[0.2, 1.0]), Setting(2), "bubble", AUTO),
        (CUTS, StepParts(1, bubble=0.4, busy=[0.6, 0.6]), Setting(2), "bubble", AUTO[::-1]),
        (
            "mode=pipeline",
            StepParts(1, bubble=0.3),
            Setting(2),
            "bubble",
            ["batch_size=256", "mode=ddp"],
        ),
        ("mode=split", StepParts(1, bubble=0.5), Setting(), "bubble", ["mode=pipeline"]),
        ("mode=pipeline", StepParts(1, bubble=0.3), Setting(2, images=200), "bubble", ["mode=ddp"]),
        (
            "ema=0.9",
            StepParts(1, optimizer=0.4),
            Setting(),
            "optimizer",
            ["batch_size=256", "ema=null"],
        ),
        (
            "logging.every_steps=1",
            StepParts(1, logging=0.4),
            Setting(),
            "logging",
            ["logging.every_steps=10"],
        ),
        ("mode=single", StepParts(1, data=0.1), Setting(), "compute", []),
        (
            "mode=single channels_last=false",
            StepParts(1),
            Setting(gpu=True),
            "compute",
            ["channels_last=true", "precision=bf16", "compile=true"],
        ),
        (
            "mode=dp",
            StepParts(1),
            Setting(gpu=True),
            "compute",
            ["precision=bf16"],
        ),  # dp refuses compile
    ],
)
def test_bound_and_what_to_try(words, measured, setting, bound, overrides):
    actual = judge(measured, RUN, load(None, *words.split()), setting)
    assert (actual.bound, list(actual.overrides)) == (bound, overrides)
    assert all(word in actual.sentence for word in overrides)
    assert "try" in actual.sentence.lower() or not overrides
    assert f"{actual.step[bound]:.0%}" in actual.sentence


def test_sentences():
    def said(measured, setting=None, words=("mode=single",), run=RUN):
        return judge(measured, run, load(None, *words), setting or Setting()).sentence

    assert re.fullmatch(
        r"61% .*images.* data\.workers=8",
        said(StepParts(1, data=0.61), Setting(cores=8, workers=4)),
    )
    uneven = said(
        StepParts(1, bubble=0.4, busy=[0.2, 1.0]),
        Setting(2),
        ("mode=pipeline", "pipeline.cuts=[a]"),
    )
    assert re.fullmatch(r"40% .*\bidle\b.*\bstage 1 .*\b1\.7 times .*pipeline\.cuts=auto", uneven)
    assert re.search(
        r"\b25% .*\bevaluation .*\b75%$", said(StepParts(1), run={"steps": 2.0, "evaluation": 6.0})
    )


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
    actual = judge(
        StepParts(1, bubble=bubble, bubble_at_most=most),
        RUN,
        recipe,
        Setting(2, gpu=True),
    )
    assert (actual.bound, [word for word in actual.overrides if word not in FASTER]) == (
        bound,
        overrides,
    )
    assert ("compile=true" in actual.overrides) == (bound == "compute" and most - bubble < 0.5), (
        "arithmetic bounds it"
    )
    assert ("computing" in actual.sentence) == (bound == "compute" and most - bubble < 0.5)
    message = f"up to {most - bubble:.0%} of the step more may be idle"
    assert (message in actual.sentence and message in (actual.unmeasured or "")) == (most > 0.2)
    assert actual.unmeasured or most < 0.2
    by_hand = recipe.replace(pipeline__microbatches=8)
    asked = judge(
        StepParts(1, bubble=bubble, bubble_at_most=most),
        RUN,
        by_hand,
        Setting(2, gpu=True),
    )
    assert (asked.overrides[0] == "pipeline.microbatches=auto") == (most > 0.5)
    assert sum(actual.step.values()) == pytest.approx(1)


GPU = Setting(gpu=True, may_replay=True)


@pytest.mark.parametrize("mode", [mode for mode in TRAITS if not TRAITS[mode].shared_memory])
def test_a_gpu_that_waits_for_python_is_reported(mode):
    """The message suggests what reduces launches, or costs nothing.

    Faster arithmetic would not help.
    """
    recipe = load(None, f"mode={mode}", "channels_last=false")
    setting = replace(GPU, processes=2)
    setting = replace(setting, processes=1) if recipe.traits.processes == "one" else setting
    actual = judge(StepParts(1, launches=0.67, optimizer=0.05), RUN, recipe, setting)
    assert actual.bound == "launches"
    assert actual.step["launches"] == 0.67
    assert actual.step["compute"] == pytest.approx(0.28)
    assert re.search(r"^the GPU .*\b67% .*Python", actual.sentence)
    assert actual.unmeasured is None
    may = explain_eager_steps(recipe.replace(graphs=True), setting.processes) is None
    assert actual.overrides == ["graphs=true"] * may + ["batch_size=256"]
    assert may >= (mode in ("single", "ddp"))
    assert "computing" not in actual.sentence


def test_graphs_are_advised_where_the_recipe_can_have_them(monkeypatch):
    tried = []
    monkeypatch.setattr(
        verdict, "keep_possible", lambda words, *_: tried.extend(words) or list(words)
    )
    for parts in (StepParts(1, launches=0.5), StepParts(1, launches_at_most=0.5)):
        assert judge(parts, RUN, load(None), GPU).overrides[0] == "graphs=true"
        assert "graphs=true" in tried
    for parts in (
        StepParts(1),
        StepParts(1, launches_at_most=0.1),
        StepParts(1, data=0.4, launches=0.3),
    ):
        assert "graphs=true" not in judge(parts, RUN, load(None), GPU).overrides
    decided = replace(GPU, may_replay=False)  # Steps are replayed, or cannot be.
    assert judge(
        StepParts(1, launches=0.5),
        RUN,
        load(None),
        decided,
    ).overrides == ["batch_size=256"]


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
        assert tried.bound == "bubble" and (tried.overrides[:1] == ["graphs=true"]) == first, (
            most,
            setting,
        )
        assert "batch_size=256" in tried.overrides


def test_launches_that_were_not_measured_are_no_computing():
    actual = judge(
        StepParts(1, optimizer=0.1, launches_at_most=0.95), RUN, load(None, "mode=single"), GPU
    )
    assert actual.bound == "compute"
    assert "computing" not in actual.sentence
    assert "up to 95% " in actual.sentence
    assert "up to 95% " in (actual.unmeasured or "")
    assert actual.overrides == ["graphs=true", "batch_size=256"]
    muon = judge(
        StepParts(1, optimizer=0.43, launches_at_most=0.95), RUN, load(None, "mode=single"), GPU
    )
    assert muon.bound == "optimizer" and "up to 95% " in muon.sentence
    few = judge(StepParts(1, launches_at_most=0.1), RUN, load(None, "mode=single"), GPU)
    assert "computing" in few.sentence
    assert "up to 10% " in few.sentence
    assert "compile=true" in few.overrides
    none = judge(StepParts(1, launches_at_most=0.04), RUN, load(None, "mode=single"), GPU)
    assert "up to" not in none.sentence and none.unmeasured is None


def test_missing_measurements_are_reported():
    recipe = load(None, "mode=ddp")
    short = judge(StepParts(1, communication=None), RUN, recipe, Setting(2))
    assert short.bound == "compute" and "communication" in short.sentence
    most = judge(
        StepParts(1, communication=0.3, at_most=True),
        RUN,
        recipe,
        Setting(2),
    )
    assert most.bound == "compute" and re.search(r"\b30% .*communication", most.sentence)
    assert most.step["communication"] == 0
    more = judge(
        StepParts(1, optimizer=0.15, communication=0.97, at_most=True),
        RUN,
        recipe,
        Setting(2),
    )
    assert "up to 85% " in (more.unmeasured or "")  # never more than is not known


@pytest.mark.parametrize(("mode", "cure"), [("ddp", "longer run"), ("fsdp", "overlap")])
def test_one_line_says_if_most_of_the_computing_may_be_communication(mode, cure):
    recipe = load(None, f"mode={mode}")
    actual = judge(
        StepParts(1, optimizer=0.06, communication=2.0, at_most=True),
        RUN,
        recipe,
        Setting(2),
    )
    assert re.fullmatch(rf"94% .*\bcommunication\b.*{cure}.*", actual.sentence), actual.sentence
    assert "up to" not in actual.sentence
    assert actual.bound == "compute"
    assert actual.step["communication"] == 0
    less = judge(
        StepParts(1, optimizer=0.06, communication=0.46, at_most=True),
        RUN,
        recipe,
        Setting(2),
    )
    assert ("46% is communication" if mode == "fsdp" else "up to 46% ") in less.sentence
    assert ("too short" in f"{less.sentence} {less.unmeasured}") == (mode == "ddp"), (
        "of fsdp no run measures it"
    )
    setting = Setting(2, gpu=True)
    for communication in (0.1, 0.9):  # whatever the sentence is, it tells what its advice is about
        message = judge(
            StepParts(1, communication=communication, at_most=True, launches=0.0),
            RUN,
            recipe,
            setting,
        )
        advised = any(word.startswith("batch_size=") for word in message.overrides)
        local_batch = recipe.batch_size // 2
        assert (f"{local_batch} images" in message.sentence) == advised, message


MANY = {
    "rank 1": "rank 1 was slower",
    "learning rate": "the rate still rises",
    "cores": "others kept the cores",
}


def test_each_advice_is_a_line_and_what_matters_most_is_the_first():
    def said(recipe="mode=ddp", run=RUN, **warnings):
        actual = judge(
            StepParts(1, communication=0.3, at_most=True),
            run,
            load(None, recipe),
            Setting(2),
            0,
            warnings,
        )
        return actual.sentence.splitlines()

    brief = {"steps": 1.0, "start-up": 4.0}
    first, *machine, step, short = said(run=brief, **MANY)
    assert first == MANY["learning rate"] and machine == [MANY["rank 1"], MANY["cores"]]
    assert step.startswith("100% ") and "try" not in step
    assert "too short" in short and all(word in short for word in ("30%", "start-up", "80%"))
    assert len(said()) == 2 and len(said("mode=single")) == 2, (
        "the step, and what the run is too short for"
    )
    _, apart = judge(
        StepParts(1), {"steps": 2.0, "evaluation": 6.0}, load(None), Setting()
    ).sentence.splitlines()
    assert "evaluation" in apart and "too short" not in apart


def test_where_others_keep_the_cores_nothing_is_tried():
    def said(warnings):
        return judge(
            StepParts(1, data=0.6),
            RUN,
            load(None, "mode=single"),
            Setting(cores=8, workers=4),
            0,
            warnings,
        )

    assert "data.workers=8" in said({}).sentence
    assert "data.workers=8" not in said({"cores": "busy"}).sentence
    assert said({"cores": "busy"}).overrides == said({}).overrides
    assert said({"cores": "busy: try threads=1"}).overrides == ["threads=1", *said({}).overrides]


def test_the_guide_names_the_parts_of_a_step():
    table = (
        (GUIDE / "speed.md")
        .read_text()
        .partition("| part | what it is |\n| --- | --- |\n")[2]
        .partition("\n\n")[0]
    )
    assert re.findall(r"^\| `(\w+)` \| [a-z]", table, re.M) == [*PARTS]


def test_written_forms():
    actual = judge(
        StepParts(0.25, data=0.1),
        RUN,
        load(None),
        Setting(),
        probe_seconds=0.02,
    )
    assert odd(actual.to_dict(), Verdict) == [] and (*actual.step,) == PARTS
    assert actual.to_dict()["run"] == pytest.approx(
        {"steps": 0.9, "start-up": 0.04, "evaluation": 0.06}
    )


@pytest.mark.parametrize(
    ("cached", "words", "told"),
    [
        (
            1.0,
            (),
            "try data.cache=disk (2.0 times the images/s) or data.workers=4",
        ),  # no more than without waiting
        (7.0, (), "try data.cache=disk (1.4 times the images/s) or data.workers=4"),
        (9.0, (), "try data.workers=4"),
        (1.0, ("data.cache=disk",), "try data.workers=4"),
    ],
)
def test_a_step_that_waits_for_photos_reports_the_readers(cached, words, told):
    setting = Setting(
        cores=2,
        workers=2,
        reading=Reading(1.0, 6.0, 3.0, cached),
    )
    actual = judge(
        StepParts(1.0, data=0.5),
        RUN,
        load(None, "mode=single", *words),
        setting,
    )
    assert re.search(
        r"^50% .*\b10% .*reading.*\b60% .*decoding.*\b30% .*transforming", actual.sentence
    )
    assert actual.sentence.endswith(f". T{told[1:]}")
    assert actual.to_dict()["reading"] == {
        "read": 1.0,
        "decode": 6.0,
        "transform": 3.0,
        "cached": cached,
    }

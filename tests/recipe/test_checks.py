"""Combinations that can run: tables of processes, images and micro-batches, and suggestions that
work.
"""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checks import refusal
from tests.options import OPTIONS
from trainer.recipe import MODES, TRAITS, Recipe, checks, load
from trainer.recipe.checks import (
    SPLIT_BACKWARD,
    V_SHAPED,
    VIRTUAL,
    check_names,
    check_options,
    check_processes,
    count_local_batches,
    microbatch_counts,
    ranks_per_pipeline,
    resolve_schedule,
)
from trainer.recipe.known_names import check_model_name
from trainer.recipe.schema import Schedule

SCHEDULES = get_args(Schedule)


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the newest torch. Refusals for an older one are tested in test_versions.py."""
    monkeypatch.setattr(checks, "torch_has", lambda what: True)


line = partial(refusal, most=300)


def recipe(words: str) -> Recipe:
    return load(None, *words.split())


def pipeline(words: str) -> Recipe:
    """Return a recipe; arguments without a key's section belong to the pipeline."""
    plain = ("batch_size", "accumulate", "augment", "mode", "compile")
    return recipe(
        " ".join(word if word.startswith(plain) else f"pipeline.{word}" for word in words.split())
    ).replace(mode="pipeline")


@pytest.mark.parametrize(
    ("words", "processes", "expected"),
    [
        ("", 2, ""),
        ("mode=single", 1, ""),
        ("mode=single", 2, r"^mode=single .* 2: .*python -m trainer \.\.\. mode=single .*torchrun"),
        ("mode=dp", 2, r"^mode=dp .* 2: .*python -m trainer \.\.\. mode=dp .*torchrun"),
        ("mode=local_sgd", 4, ""),
        ("", 3, ""),  # 43 + 43 + 42
        (
            "mode=fsdp batch_size=14 accumulate=2 augment.mixup=0.2",
            3,
            r"^batch_size=14 .* 3 .*accumulate=2 .*mixup, cutmix.*batch_size=12 or 24$",
        ),
        ("mode=fsdp batch_size=16 accumulate=2 augment.mixup=0.2", 3, ""),
        (
            "mode=local_sgd",
            3,
            r"^batch_size=128 .* 3 .*batch_size=126 or 129$",
        ),
        ("batch_size=4", 8, r"^batch_size=4 .* 8 .*batch_size=8$"),
        ("batch_size=6 accumulate=2", 4, r"^batch_size=6 .* 4 .*accumulate=2; .*batch_size=8$"),
        (
            "batch_size=3 augment.mixup=0.2",
            1,
            r"^batch_size=3 .*mixup, cutmix.*batch_size=2 or 4$",
        ),
    ],
)
def test_processes(words: str, processes: int, expected: str) -> None:
    message = line(check_processes, recipe(words), processes)
    assert re.search(expected, message) and bool(message) == bool(expected)


def test_hogwild_is_for_one_node() -> None:
    assert line(check_processes, recipe("mode=hogwild"), 4, 1) == ""
    assert "mode=local_sgd" in line(check_processes, recipe("mode=hogwild"), 4, 2)


@pytest.mark.parametrize(
    ("words", "processes", "expected"),
    [
        # Cases of one process
        ("", 1, ""),
        ("schedule=streams microbatches=7", 1, ""),  # uneven micro-batches are fine
        ("microbatches=129", 1, r"^pipeline\.microbatches=129 .* 128 images: .*\b128\b"),
        (
            "schedule=streams virtual_stages=2",
            1,
            r"^pipeline\.schedule=streams .* 1 .*virtual_stages\b.* 2: .*\.virtual_stages\b",
        ),
        (
            "schedule=streams",
            2,
            r"^pipeline\.schedule=streams .* 1 .* 2: .*python -m trainer \.\.\. .*torchrun",
        ),
        *(
            (f"schedule={name}", 1, rf"^pipeline\.schedule={name} .*\b2 processes\b")
            for name in SCHEDULES
            if name != "streams"
        ),
        (
            "schedule=1f1b stages=4",
            1,
            r"torchrun --standalone --nproc_per_node=4 -m trainer \.\.\. or nproc=4\b",
        ),
        # P x R processes
        *((f"schedule={name}", 4, "") for name in SCHEDULES if name != "streams"),
        *((f"schedule={name} stages=2", 4, "") for name in SCHEDULES if name != "streams"),
        (
            "stages=2",
            3,
            r"^pipeline\.stages=2 .* 3: .*torchrun --standalone --nproc_per_node=2 -m trainer ..."
            r" .*nproc=.* 2 or 4\b",
        ),
        (
            "stages=4",
            2,
            r"^pipeline\.stages=4 .* 2: .*torchrun --standalone --nproc_per_node=4 -m trainer ..."
            r" .*nproc=.* 4\b",
        ),
        # 2 x 2 stages
        ("batch_size=15 stages=2", 4, r"^batch_size=15 .* 2 replicas; .*batch_size=12 or 16$"),
        (
            "batch_size=14 stages=2 accumulate=2",
            4,
            r"^batch_size=14 .* 2 replicas .*accumulate=2; .*batch_size=8 or 16$",
        ),
        # virtual stages
        *((f"schedule={name} virtual_stages=3", 2, "") for name in VIRTUAL if name not in V_SHAPED),
        ("schedule=zbv virtual_stages=2", 2, ""),
        (
            "schedule=zbv virtual_stages=3",
            2,
            # No other schedule is suggested.
            r"^pipeline\.schedule=zbv .* 2 .*virtual_stages\b.* 3: [^=]*virtual_stages[^=]*$",
        ),
        ("schedule=gpipe virtual_stages=1", 2, ""),
        (
            "schedule=gpipe virtual_stages=2",
            2,
            r"^pipeline\.schedule=gpipe .* 2: .*pipeline\.schedule=interleaved1f1b or loopedbfs$",
        ),
        (
            "virtual_stages=2",
            2,
            r"^pipeline\.schedule=1f1b .* 1 .*pipeline\.virtual_stages\b.* 2: ",
        ),
        # micro-batches
        ("microbatches=8", 2, ""),
        (
            "microbatches=7",
            2,
            r"^pipeline\.microbatches=7: 128 images .*pipeline\.microbatches=2, 4, 8, ",
        ),
        (
            "split_size=7",
            2,
            r"^pipeline\.split_size=7: 128 images .*pipeline\.split_size=1, 2, 4, 8, 16, 32, 64$",
        ),
        (
            "microbatches=1",
            2,
            r"^pipeline\.microbatches=1: pipeline\.schedule=1f1b .*\(2\).*"
            r"pipeline\.microbatches=2, 4, 8, ",
        ),
        (
            "split_size=128",
            2,
            r"^pipeline\.split_size=128: pipeline\.schedule=1f1b .*\(2\).*"
            r"pipeline\.split_size=1, 2, ",
        ),
        ("schedule=gpipe microbatches=1", 2, ""),
        (
            "schedule=dualpipev microbatches=2",
            2,
            r"^pipeline\.microbatches=2: pipeline\.schedule=dualpipev .*\(4\).*"
            r"pipeline\.microbatches=4, 8, ",
        ),
        (
            "batch_size=120 schedule=interleaved1f1b microbatches=5",
            2,
            r"^pipeline\.microbatches=5: pipeline\.schedule=interleaved1f1b .* 2 rounds; ",
        ),
        (
            "batch_size=120 schedule=interleavedzerobubble microbatches=15",
            2,
            r"^pipeline\.microbatches=15: pipeline\.schedule=interleavedzerobubble .* 7 rounds; ",
        ),
        ("batch_size=120 schedule=loopedbfs microbatches=15", 2, ""),
        (
            "batch_size=2",
            3,
            r"^2 images .*pipeline\.schedule=1f1b\b.* 3 .*batch_size=3$",
        ),
        # pairs, too
        (
            "batch_size=2 augment.mixup=0.1",
            3,
            r"^2 images .*pipeline\.schedule=1f1b\b.* 3 .*batch_size=6$",
        ),
        ("batch_size=8 stages=2 accumulate=2", 4, ""),
        (
            "batch_size=8 stages=2 accumulate=2 microbatches=4",
            4,
            r"^pipeline\.microbatches=4: 2 images .*\(batch_size=8, accumulate=2\)",
        ),
    ],
)
def test_processes_of_pipelines(words: str, processes: int, expected: str) -> None:
    message = line(check_processes, pipeline(words), processes)
    assert re.search(expected, message) and bool(message) == bool(expected)


def advice(text: str) -> list[dict[str, Any]]:
    """List the changes that a message suggests."""
    tried = re.search(r"try ([\w.]+)=([\d, or]+)$", text)
    if tried:
        return [{tried[1]: int(number)} for number in re.findall(r"\d+", tried[2])]
    ways: list[dict[str, Any]] = [
        {"nproc": int(n)} for n in re.findall(r"(?:nproc_per_node|nproc)=(\d+)", text)
    ]
    ways += [{"nproc": int(n)} for n in re.findall(r"\b(\d+)(?= or \d+ would do| would do)", text)]
    ways += [{"nproc": 1}] if "without torchrun" in text else []
    ways += [
        {"pipeline.schedule": name}
        for name in SCHEDULES
        if re.search(rf"\b{name}\b", text.partition(": ")[2])
    ]
    ways += (
        [{"pipeline.virtual_stages": None}] if "leave pipeline.virtual_stages out" in text else []
    )
    ways += [{"pipeline.microbatches": int(n)} for n in re.findall(r"at most (\d+) can be", text)]
    return ways


def follow(
    words: dict[str, Any],
    processes: int,
    taken: frozenset[str] = frozenset(),
) -> str:
    """Follow each suggestion until the recipe can run. Return the error, if any."""
    text = line(check_processes, Recipe.model_validate(unflatten(words)), processes)
    ways = advice(text)
    if text and not ways:
        return f"no advice: {text}"
    for way in ways:
        if taken & way.keys():
            return f"again {way}: {text}"
        nproc = way.get("nproc", processes)
        actual = follow({**words, **way}, nproc, taken | way.keys())
        if actual:
            return f"{actual} after {way} of '{text}'"
    return ""


def unflatten(words: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"mode": "pipeline"}
    for key in words.keys() - {"nproc"}:
        section, _, last = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = words[key]
    return tree


@pytest.mark.slow
def test_advice_works_when_it_is_followed(full: bool) -> None:
    """Whatever is wrong, each way out that the line names leads to a recipe that runs; no key is
    named twice.
    """
    choices: dict[str, Any] = {
        "pipeline.schedule": (None, *SCHEDULES),
        "pipeline.stages": (None, 2, 3),
        "pipeline.virtual_stages": (None, 1, 3),
        "batch_size": (2, 7, 12, 30),
        "accumulate": (1, 2),
        "augment.mixup": (0.0, 0.2),
    }
    sizes: list[dict[str, int]] = [{}]
    sizes += [{"pipeline.microbatches": 3}, {"pipeline.microbatches": 8}]
    sizes += [{"pipeline.split_size": 2}, {"pipeline.split_size": 5}]
    cases = [
        ({**dict(zip(choices, values, strict=True)), **size}, processes)
        for values in itertools.product(*choices.values())
        for size in sizes
        for processes in (1, 2, 3, 4, 6)
    ]
    wrong = 0
    for words, processes in cases if full else cases[::37]:
        wrong += bool(line(check_processes, Recipe.model_validate(unflatten(words)), processes))
        assert not follow(words, processes), (words, processes)
    assert wrong > (400 if full else 200)


@pytest.mark.parametrize(
    ("words", "processes", "counts"),
    [
        ("batch_size=12", 1, [1, 2, 3, 4, 6, 8, 12]),
        ("batch_size=500", 1, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        ("batch_size=12 microbatches=5", 1, [5]),
        ("batch_size=12 split_size=5", 1, [3]),
        ("batch_size=12 split_size=50", 1, [1]),
        ("batch_size=12", 2, [2, 3, 4, 6, 12]),
        ("batch_size=12", 4, [4, 6, 12]),
        ("batch_size=24 stages=2", 4, [2, 3, 4, 6, 12]),  # A replica has 12 images.
        ("batch_size=24 stages=2 accumulate=2", 4, [2, 3, 6]),
        ("batch_size=12 schedule=gpipe", 4, [1, 2, 3, 4, 6, 12]),
        ("batch_size=12 schedule=dualpipev", 2, [4, 6, 12]),
        ("batch_size=60 schedule=interleaved1f1b", 2, [1, 2, 3, 4, 6, 10, 12, 20, 30, 60]),
    ],
)
def test_microbatch_counts(words: str, processes: int, counts: list[int]) -> None:
    assert microbatch_counts(pipeline(words), processes) == counts


@pytest.fixture
def as_one_of():
    """Make this process one rank of `count`, which exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_accepts_the_same_numbers_of_micro_batches(ranks: int, as_one_of) -> None:
    from torch.distributed.pipelining import PipelineStage

    from trainer.modes.pipeline.torch_schedules import SCHEDULES as KINDS
    from trainer.modes.pipeline.torch_schedules import assign_ranks

    as_one_of(ranks)
    sample = torch.zeros(1, 2)
    layer = nn.Linear(2, 2)
    cpu = torch.device("cpu")
    for name, kind in KINDS.items():
        holders = assign_ranks(name, ranks, VIRTUAL.get(name, 1))
        own = [stage for stage, rank in enumerate(holders) if rank == 0]
        images = 2520  # has every divisor up to 10
        expected = list(range(1, 11))
        counts = microbatch_counts(pipeline(f"schedule={name} batch_size={images}"), ranks)
        accepted = []
        inputs = {"input_args": sample, "output_args": sample}
        for m in expected:
            parts = [PipelineStage(layer, stage, len(holders), cpu, **inputs) for stage in own]
            more = {"stage_seconds": [(1.0, 2.0)] * len(holders)} if name == "measured" else {}
            with suppress(ValueError):
                kind(
                    parts if name in VIRTUAL else parts[0],
                    m,
                    loss_fn=lambda a, b: a.sum(),
                    **more,
                )
                accepted.append(m)
        assert [m for m in counts if m in expected] == accepted, name


def test_who_holds_what() -> None:
    assert resolve_schedule(pipeline(""), 1) == "streams"
    assert resolve_schedule(pipeline(""), 4) == "1f1b"
    assert resolve_schedule(pipeline("schedule=zbv"), 4) == "zbv"
    assert [ranks_per_pipeline(pipeline("stages=2"), n) for n in (1, 2, 4)] == [1, 2, 2]
    assert [count_local_batches(pipeline("stages=2"), n) for n in (1, 2, 4)] == [1, 1, 2]
    assert [count_local_batches(pipeline(""), n) for n in (1, 2, 4)] == [1, 1, 1]
    assert [count_local_batches(recipe("pipeline.stages=2"), n) for n in (1, 2, 4)] == [
        1,
        2,
        4,
    ]  # ddp


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(mode: str, option: str) -> None:
    """Options are refused as in the table, with its reason, for any number of processes."""
    key, value = OPTIONS[option]
    on = recipe(f"mode={mode} {key}={str(value).lower()}")
    reason = TRAITS[mode].refuses.get(option, "")
    word = f"{key}={str(value).lower()}"
    assert line(check_options, on) == (f"{word} is not for mode={mode}: {reason}" if reason else "")
    count = 1 if TRAITS[mode].processes == "one" else 2
    assert line(check_processes, on, count) == line(check_options, on)


def test_every_refusal_is_of_an_option_that_is_tried_in_every_mode() -> None:
    refused = {option for traits in TRAITS.values() for option in traits.refuses}
    assert refused == {*checks.OPTIONS}
    assert checks.OPTIONS.items() <= OPTIONS.items()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compile_needs_a_whole_backward_pass(schedule: str) -> None:
    text = line(check_options, pipeline(f"schedule={schedule} compile=true"))
    assert ("pipeline.schedule=1f1b" in text) == (schedule in SPLIT_BACKWARD) == bool(text)
    assert not line(check_options, pipeline(f"schedule={schedule}"))
    assert not line(check_options, recipe(f"mode=ddp compile=true pipeline.schedule={schedule}"))


def test_names_are_checked_without_importing_what_holds_them() -> None:
    for name in ("cnn", "resnet50", "vit_b_16"):
        check_model_name(name)
    assert "model.name=resnet50?" in line(check_model_name, "resnet5o")
    assert "small ones: mlp, cnn" in line(check_model_name, "zzz")
    check_names(load("mnist"))
    assert "data.name=cifar10?" in line(check_names, load(None, "data.name=cifar1O"))
    assert "optimizer.name=adam?" in line(check_names, load(None, "optimizer.name=adm"))
    assert "optimizer.name=lbfgs" in line(check_names, load(None, "optimizer.name=lbfgs"))
    assert "schedule.name=cosine?" in line(check_names, load(None, "schedule.name=cosin"))


def test_training_uses_one_kind_of_device() -> None:
    message = line(check_options, recipe("devices=[cuda:0,cpu]"))
    assert re.search(r"^devices=cuda:0,cpu .*\bcpu\b.*\bcuda\b", message)
    assert not line(check_options, recipe("devices=[cuda:0,cuda:1]"))


def test_a_batch_that_is_small_for_many_gpus() -> None:
    words = "batch_size=1024 optimizer.lr=0.4"
    assert checks.suggest_wider_batch(recipe("batch_size=256 schedule.warmup_epochs=1"), 8) == words
    # A high rate needs one.
    assert checks.suggest_wider_batch(load("resnet50"), 8) == f"{words} schedule.warmup_epochs=5"
    assert (
        checks.suggest_wider_batch(recipe("batch_size=96 optimizer.name=adamw"), 2)
        == "batch_size=384"
    )
    assert checks.suggest_wider_batch(recipe("batch_size=256"), 8, images=1000) is None
    assert checks.suggest_wider_batch(recipe("batch_size=256"), 4) is None
    assert checks.suggest_wider_batch(recipe(""), 1) is None
    assert checks.suggest_wider_batch(recipe("batch_size=256 mode=pipeline"), 8) is None


def test_combinations_that_recompute_excludes() -> None:
    for words in (
        "compile=true recompute=true",
        "compile=true recompute=auto",
        "graphs=true recompute=true",
    ):
        assert not line(check_processes, recipe(f"mode=single {words}"), 1)
    assert not line(
        check_processes, recipe("mode=split compile=true graphs=true recompute=true"), 1
    )
    assert "recompute=true, or recompute=false" in line(
        check_options, recipe("mode=split recompute=auto")
    )

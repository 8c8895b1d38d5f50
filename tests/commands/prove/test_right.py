"""The checks of what is right: that every machine gets runs that can start, and that no answer
passes by default.
"""

import dataclasses
import math
import re

import pytest
import torch

from tests.commands.prove.proofs import machine, runner
from trainer.commands.prove import fast, right
from trainer.commands.prove.check_runner import Outcome
from trainer.commands.prove.prove_probe import compare, list_types, make_pattern
from trainer.commands.prove.right import (
    STEPS,
    TOLERANCE,
    Traces,
    compare_bits,
    compare_traces,
    list_arguments,
    list_modes,
)
from trainer.commands.trials.engine import TrialFailed
from trainer.devices.assignment import assign_devices
from trainer.recipe import TRAITS, load
from trainer.recipe.checks import VIRTUAL, check_processes, list_refused_schedules
from trainer.recipe.recipe_files import split_arguments

BLOCKS = 7  # Number of blocks of cnn_gn; the model can be cut between them.
MACHINES = [
    ("cpu", 1),
    ("cpu", 2),
    ("cpu", 3),
    *[("cuda", n) for n in (1, 2, 3, 6, 7, 8, 16)],
]
CPUS = machine("cpu", 2)
CARD = machine("cuda", 1)


@pytest.mark.parametrize(("kind", "count"), MACHINES)
def test_every_run_can_start_on_every_machine(kind, count):
    devices = machine(kind, count)
    modes = [mode for mode in list_modes(devices) if mode.name not in list_refused_schedules()]
    runs = {mode.name: [*list_arguments(devices), *mode.words] for mode in modes}
    for network in fast.NETWORKS[devices.kind]:
        for several in fast.list_counts(devices):
            where = (
                ["mode=ddp", *devices.in_ranks(several)]
                if several > 1
                else ["mode=single", *devices.in_one_process()]
            )
            runs[f"{network.name} {several}"] = fast.build_arguments(
                where, network, several, 64 * several, "bf16", 20
            )
    for name, words in runs.items():
        options, rest = split_arguments(words, ("recipe", "nproc"))
        assert len({word.partition("=")[0] for word in words}) == len(words), (
            f"{name} says a key twice"
        )
        recipe = load(options.get("recipe"), *rest)
        size = int(options.get("nproc", 1))
        check_processes(recipe, size)
        if not recipe.traits.shared_memory:
            assign_devices(recipe, size, count if kind == "cuda" else 0)
        stages = (recipe.pipeline.stages or 1) * VIRTUAL.get(recipe.pipeline.schedule, 1)
        assert stages <= BLOCKS, name
        assert "deterministic" not in words or kind == "cuda"


@pytest.mark.parametrize(("kind", "count"), MACHINES)
def test_every_mode_is_there(kind, count):
    devices = machine(kind, count)
    actual = {
        word.partition("=")[2]
        for mode in list_modes(devices)
        for word in mode.words
        if word.startswith("mode=")
    }
    possible = set()
    for mode, traits in TRAITS.items():
        needs_devices = traits.processes == "many" and traits.same_maths
        if not traits.reference and (count > 1 or not needs_devices):
            possible.add(mode)
    assert actual == possible
    names = {check.name for check in right.list_checks(devices)}
    assert {"doctor", "repeat", "resume", "precision bf16", "compile"} <= names
    assert ("graphs" in names) == (kind == "cuda")
    assert {"sums", "copies"} & names == ({"sums", "copies"} if count > 1 else set())


def test_patterns_that_nobody_compared_are_wrong(tmp_path):
    assert (
        right.sums(
            runner(
                tmp_path,
                CPUS,
                [{"done": 0, "wrong": []}] * 2,
            )
        ).status
        == "wrong"
    )
    answers = [{"done": 9, "wrong": ["cuda:0 to cuda:1: odd"]}, {"done": 9, "wrong": []}]
    bad = right.copies(runner(tmp_path, machine("cuda", 2), answers))
    assert re.fullmatch("1 of 18 .*: cuda:0 to cuda:1: odd", bad.line)
    assert "NCCL_P2P_DISABLE=1" in bad.todo
    good = right.copies(
        runner(
            tmp_path,
            CPUS,
            [{"done": 9, "wrong": []}] * 2,
        )
    )
    assert good.status == "right" and good.figures["done"] == 18


def test_findings_of_doctor_are_faults(tmp_path):
    actual = right.doctor(
        runner(
            tmp_path,
            CPUS,
            [{"problems": ["a full disk", "and more"]}],
        )
    )
    assert actual.status == "wrong" and actual.line == "a full disk; and more"
    assert (
        right.doctor(
            runner(
                tmp_path,
                CPUS,
                [{"problems": []}],
            )
        ).status
        == "right"
    )


def test_only_what_an_older_torch_lacks_may_be_refused(tmp_path, monkeypatch):
    """Any other failure is an error of the machine and must not be mistaken for a missing
    feature.
    """

    def trace(runner, name, *words):
        return words and runner.train(name, words)

    monkeypatch.setattr(right, "trace", trace)
    modes = {mode.name: mode for mode in list_modes(CPUS)}
    for name, code in (("zbv", 7), ("1f1b", 2), ("ddp", 2)):
        with pytest.raises(TrialFailed):
            right._check_mode(
                modes[name], runner(tmp_path, CPUS, error=TrialFailed("needs torch 2.14", code))
            )
    actual = right._check_mode(
        modes["zbv"], runner(tmp_path, CPUS, error=TrialFailed("needs torch 2.14", 2))
    )
    assert actual == Outcome("not here", "needs torch 2.14")


@pytest.mark.parametrize(("way", "status"), [("replayed", "right"), ("launched", "wrong")])
def test_steps_that_were_not_replayed_prove_nothing(tmp_path, monkeypatch, way, status):
    monkeypatch.setattr(right, "load_traces", lambda path: run())
    assert right.check_graphs(runner(tmp_path, CARD, result={"graphs": way})).status == status


# --- patterns that expose a lost, doubled or shifted element

KINDS = [*list_types(torch.device("cpu")), torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("among", [1, 2, 8])
def test_sums_are_exact_and_tell_ranks_and_neighbours_apart(kind, among):
    parts = [make_pattern(1023, kind, rank, among) for rank in range(among)]
    total = sum(part.double() for part in parts)
    assert torch.equal(total.to(kind).double(), total), "the sum can be held exactly"
    assert len({tuple(part.tolist()) for part in parts}) == among, "each rank's is another"
    for other in (
        total.roll(1),
        total.roll(7),
        total + parts[0].double(),
        total - parts[-1].double(),
    ):
        assert (
            compare(
                other.to(kind),
                total.to(kind),
                "it",
                bad := [],
            )
            == 1
        )
        assert len(bad) == 1
    damaged = total.clone()
    damaged[500] = damaged[499]
    assert compare(damaged.to(kind), total.to(kind), "it", bad := [])
    assert "element 500 is" in bad[0]
    assert compare(total.to(kind), total.to(kind), "it", bad := [])
    assert bad == []


# --- how far two runs are apart: what must not pass does not
# ----------------------------------------------------------


def run(**changes):
    generator = torch.Generator().manual_seed(0)

    def tensors():
        return {name: torch.randn(8, generator=generator) for name in ("a", "b")}

    plain = Traces(
        [2.0 - 0.01 * n for n in range(STEPS)],
        [1.0] * STEPS,
        tensors(),
        tensors(),
    )
    return dataclasses.replace(plain, **changes)


def bits(actual, expected):
    actual_value = compare_bits(actual, expected, "it", "mend it")
    assert (actual_value.status == "right") == (actual_value.figures["different"] == [])
    return actual_value.figures["different"]


FAULTS = {
    "a loss of one step": lambda one: {"losses": [*one.losses[:-1], one.losses[-1] * 1.01]},
    "a step too few": lambda one: {"losses": one.losses[:-1]},
    "no losses": lambda one: {"losses": []},
    "a loss that is no number": lambda one: {"losses": [math.nan] * STEPS},
    "a norm": lambda one: {"norms": [*one.norms[:-1], 1.1]},
    "no norms": lambda one: {"norms": []},
    "a weight": lambda one: {"weights": one.weights | {"a": one.weights["a"] * 1.02}},
    "a weight that is no number": lambda one: {
        "weights": one.weights | {"a": one.weights["a"] * math.nan}
    },
    "a weight's shape": lambda one: {"weights": one.weights | {"a": one.weights["a"][:7]}},
    "a weight that is missing": lambda one: {"weights": {"b": one.weights["b"]}},
    "a weight more": lambda one: {"weights": one.weights | {"c": torch.ones(1)}},
    "no optimizer's state": lambda one: {"optimizer": {}},
    "half of a momentum": lambda one: {"optimizer": one.optimizer | {"b": one.optimizer["b"] / 2}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_beyond_the_bounds(fault):
    one = run()
    other = dataclasses.replace(one, **FAULTS[fault](one))
    for kind in TOLERANCE:
        actual = compare_traces(other, one, TOLERANCE[kind], "mend it")
        assert (
            actual.status == "wrong"
            and actual.todo == "mend it"
            and actual.line.startswith("differs: ")
        ), actual
    assert bits(other, one)


def test_differences_by_rounding_pass_and_are_printed():
    one = run()
    other = dataclasses.replace(
        one, optimizer={name: t * (1 + 1e-6) for name, t in one.optimizer.items()}
    )
    actual = compare_traces(other, one, TOLERANCE["cpu"], "mend it")
    assert (
        actual.status == "right" and "optimizer 1e-06" in actual.line and "losses 0" in actual.line
    )
    assert actual.figures["deviations"]["optimizer"] == pytest.approx(1e-6, rel=0.2)
    assert bits(other, one) == ["optimizer"]


def test_only_whole_runs_are_the_same():
    assert "last bit" in compare_traces(run(), run(), TOLERANCE["cpu"], "").line
    assert bits(run(), run()) == []
    early = run(losses=[1.0] * 3)
    nothing = Traces([], [], {}, {})
    assert bits(early, early) == ["steps"], "two runs that ended early prove nothing"
    assert compare_traces(nothing, nothing, TOLERANCE["cuda"], "").status == "wrong"
    assert bits(nothing, nothing)

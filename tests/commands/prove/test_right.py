"""The checks of what is right: that every machine gets runs that can start, and that no answer passes by default."""

import dataclasses
import math
import re

import pytest
import torch

from tests.commands.prove.proofs import machine, runner
from trainer.commands.prove import fast, prove_probe, right
from trainer.commands.prove.check_runner import Outcome
from trainer.commands.prove.prove_probe import compare, pattern, types
from trainer.commands.prove.right import STEPS, TOLERANCE, Traces, compared, digits, modes_here, same_bits
from trainer.commands.trials.engine import TrialFailed
from trainer.devices.assignment import assign_devices
from trainer.recipe import TRAITS, load
from trainer.recipe.checks import VIRTUAL, check_processes, refused_schedules
from trainer.recipe.recipe_files import split_words

BLOCKS = 7  # of cnn_gn, between which it can be cut
MACHINES = [("cpu", 1), ("cpu", 2), ("cpu", 3), *[("cuda", n) for n in (1, 2, 3, 6, 7, 8, 16)]]
CPUS, CARD = machine("cpu", 2), machine("cuda", 1)


@pytest.mark.parametrize(("kind", "count"), MACHINES)
def test_every_run_can_start_on_every_machine(kind, count):
    devices = machine(kind, count)
    modes = [mode for mode in modes_here(devices) if not mode.newer or mode.name not in refused_schedules()]
    runs = {mode.name: [*digits(devices), *mode.words] for mode in modes}
    for name, words in right.held_out_ways(devices):
        runs[f"held out {name}"] = ["data.name=digits", f"batch_size={24 * count}", *words]
    kept = {"batch": 64, "precision": "bf16", "compile": True}
    for network in fast.NETWORKS[devices.kind]:
        for several in fast.counts(devices):
            where = ["mode=ddp", *devices.in_ranks(several)] if several > 1 else ["mode=single", *devices.first()]
            runs[f"{network.name} {several}"] = fast.words_of(where, network, several, kept, 20)
    for name, words in runs.items():
        options, rest = split_words(words, ("recipe", "nproc"))
        assert len({word.partition("=")[0] for word in words}) == len(words), f"{name} says a key twice"
        recipe, size = load(options.get("recipe"), *rest), int(options.get("nproc", 1))
        check_processes(recipe, size)
        if not recipe.traits.shared_memory:
            assign_devices(recipe, size, count if kind == "cuda" else 0)
        stages = (recipe.pipeline.stages or 1) * VIRTUAL.get(recipe.pipeline.schedule, 1)
        assert stages <= BLOCKS, name
        assert "deterministic" not in words or kind == "cuda"


@pytest.mark.parametrize(("kind", "count"), MACHINES)
def test_every_mode_is_there(kind, count):
    devices = machine(kind, count)
    found = {word.partition("=")[2] for mode in modes_here(devices) for word in mode.words if word.startswith("mode=")}
    assert found == {*TRAITS} - {"single"} - ({"ddp", "fsdp"} if count == 1 else set())
    names = {check.name for check in right.checks(devices)}
    assert {"doctor", "repeat", "resume", "held out single", "precision bf16", "compile", "memory"} <= names
    assert ("graphs" in names) == (kind == "cuda")
    assert {"sums", "copies"} & names == ({"sums", "copies"} if count > 1 else set())


def test_patterns_that_nobody_compared_are_wrong(tmp_path):
    assert right.sums(runner(tmp_path, CPUS, [{"done": 0, "wrong": []}] * 2)).status == "wrong"
    answers = [{"done": 9, "wrong": ["cuda:0 to cuda:1: odd"]}, {"done": 9, "wrong": []}]
    bad = right.copies(runner(tmp_path, machine("cuda", 2), answers))
    assert re.fullmatch("1 of 18 .*: cuda:0 to cuda:1: odd", bad.line) and "NCCL_P2P_DISABLE=1" in bad.todo
    good = right.copies(runner(tmp_path, CPUS, [{"done": 9, "wrong": []}] * 2))
    assert good.status == "right" and good.figures["done"] == 18


def numbered(count=83, total=3486, squares=194054):
    return {"data": {"val_samples": count}, "val_mae": total / 83, "val_loss": squares / 83}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (numbered(), "each of 83 images was counted once"),
        (numbered(84, 3486 + 83, 194054 + 83**2), "images 84 instead of 83"),
        (numbered(83, 3486 + 1), "sum of numbers 3487 instead of 3486"),
        (numbered(83, 3486, 194054 + 2), "sum of squares 194056 instead of 194054"),  # 3 and 5 for 4 and 4
    ],
)
def test_each_held_out_image_once(result, says, tmp_path):
    check = next(check for check in right.checks(CPUS) if check.name == "held out ddp")
    found = check.run(runner(tmp_path, CPUS, result=result))
    assert says in found.line and found.status == ("right" if result == numbered() else "wrong")
    assert prove_probe.COUNT == 83


def test_memory_that_each_run_keeps_is_a_leak_and_one_that_settles_is_none(tmp_path):
    mib = 2**20
    found = right.memory(runner(tmp_path, CPUS, [{"host": [100 * mib, 150 * mib, 201 * mib]}]))
    assert found.status == "wrong" and re.search(r"\b50 MiB .*\bhost", found.line)
    found = right.memory(runner(tmp_path, CARD, [{"host": [100 * mib] * 3, "device": [0, 30 * mib, 60 * mib]}]))
    assert found.status == "wrong" and re.search(r"\b30 MiB .*\bdevice", found.line)
    found = right.memory(runner(tmp_path, CPUS, [{"host": [100 * mib, 160 * mib, 160 * mib]}]))
    assert found.status == "right" and found.figures["kept_bytes"] == {"host": 0}


def test_what_doctor_finds_is_wrong(tmp_path):
    found = right.doctor(runner(tmp_path, CPUS, [{"problems": ["a full disk", "and more"]}]))
    assert found.status == "wrong" and re.fullmatch(r"a full disk.*\b1 .*", found.line)
    assert right.doctor(runner(tmp_path, CPUS, [{"problems": []}])).status == "right"


def test_only_what_an_older_torch_lacks_may_be_refused(tmp_path, monkeypatch):
    """Anything else that does not run is wrong: it must not be taken for something that this machine need not do."""
    monkeypatch.setattr(right, "single", lambda runner: None)
    modes = {mode.name: mode for mode in modes_here(CPUS)}
    for name, code in (("zbv", 7), ("1f1b", 2), ("ddp", 2)):
        with pytest.raises(TrialFailed):
            right._mode(modes[name], runner(tmp_path, CPUS, error=TrialFailed("needs torch 2.14", code)))
    found = right._mode(modes["zbv"], runner(tmp_path, CPUS, error=TrialFailed("needs torch 2.14", 2)))
    assert found == Outcome("not here", "needs torch 2.14")


@pytest.mark.parametrize(("way", "status"), [("replayed", "right"), ("launched", "wrong")])
def test_steps_that_were_not_replayed_prove_nothing(tmp_path, monkeypatch, way, status):
    monkeypatch.setattr(right, "traces", lambda path: run())
    assert right.replayed(runner(tmp_path, CARD, result={"graphs": way})).status == status


# --- patterns by which a lost, doubled or shifted element shows -------------------------------------------------------

KINDS = [*types(torch.device("cpu")), torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("among", [1, 2, 8])
def test_sums_are_exact_and_tell_ranks_and_neighbours_apart(kind, among):
    parts = [pattern(1023, kind, rank, among) for rank in range(among)]
    total = sum(part.double() for part in parts)
    assert torch.equal(total.to(kind).double(), total), "the sum can be held exactly"
    assert len({tuple(part.tolist()) for part in parts}) == among, "each rank's is another"
    for other in (total.roll(1), total.roll(7), total + parts[0].double(), total - parts[-1].double()):
        assert compare(other.to(kind), total.to(kind), "it", bad := []) == 1 and len(bad) == 1
    damaged = total.clone()
    damaged[500] = damaged[499]
    assert compare(damaged.to(kind), total.to(kind), "it", bad := []) and "element 500 is" in bad[0]
    assert compare(total.to(kind), total.to(kind), "it", bad := []) and bad == []


# --- how far two runs are apart: what must not pass does not ----------------------------------------------------------


def run(**changes):
    generator = torch.Generator().manual_seed(0)

    def tensors():
        return {name: torch.randn(8, generator=generator) for name in ("a", "b")}

    plain = Traces([2.0 - 0.01 * n for n in range(STEPS)], [1.0] * STEPS, tensors(), tensors())
    return dataclasses.replace(plain, **changes)


def bits(actual, expected):
    found = same_bits(actual, expected, "it", "mend it")
    assert (found.status == "right") == (found.figures["different"] == [])
    return found.figures["different"]


FAULTS = {
    "a loss of one step": lambda one: {"losses": [*one.losses[:-1], one.losses[-1] * 1.01]},
    "a step too few": lambda one: {"losses": one.losses[:-1]},
    "no losses": lambda one: {"losses": []},
    "a loss that is no number": lambda one: {"losses": [math.nan] * STEPS},
    "a norm": lambda one: {"norms": [*one.norms[:-1], 1.1]},
    "no norms": lambda one: {"norms": []},
    "a weight": lambda one: {"weights": one.weights | {"a": one.weights["a"] * 1.02}},
    "a weight that is no number": lambda one: {"weights": one.weights | {"a": one.weights["a"] * math.nan}},
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
        found = compared(other, one, TOLERANCE[kind], "mend it")
        assert found.status == "wrong" and found.todo == "mend it" and found.line.startswith("differs: "), found
    assert bits(other, one)


def test_rounding_alone_is_right_and_tells_how_much():
    one = run()
    other = dataclasses.replace(one, optimizer={name: t * (1 + 1e-6) for name, t in one.optimizer.items()})
    found = compared(other, one, TOLERANCE["cpu"], "mend it")
    assert found.status == "right" and "optimizer 1e-06" in found.line and "losses 0" in found.line
    assert found.figures["deviations"]["optimizer"] == pytest.approx(1e-6, rel=0.2)
    assert bits(other, one) == ["optimizer"]


def test_only_whole_runs_are_the_same():
    assert "last bit" in compared(run(), run(), TOLERANCE["cpu"], "").line and bits(run(), run()) == []
    early, nothing = run(losses=[1.0] * 3), Traces([], [], {}, {})
    assert bits(early, early) == ["steps"], "two runs that ended early prove nothing"
    assert compared(nothing, nothing, TOLERANCE["cuda"], "").status == "wrong" and bits(nothing, nothing)

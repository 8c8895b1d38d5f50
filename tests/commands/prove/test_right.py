"""The checks of what is right: that every machine gets runs that can start, and that no answer passes by default."""

from __future__ import annotations

import re

import pytest

from trainer.commands.prove import fast, held_out, right
from trainer.commands.prove.check_runner import CheckRunner, Devices, Outcome
from trainer.commands.prove.right import digits, held_out_ways, modes_here, pipeline
from trainer.commands.trials.engine import TrialFailed
from trainer.devices.assignment import assign_devices
from trainer.recipe import TRAITS, load
from trainer.recipe.checks import VIRTUAL, check_processes, refused_schedules
from trainer.recipe.recipe_files import split_words

BLOCKS = 7  # of cnn_gn, between which it can be cut


def machine(kind, count):
    names = ("cpu",) * count if kind == "cpu" else tuple(f"cuda:{n}" for n in range(count))
    return Devices(names, kind, ("CPU" if kind == "cpu" else "NVIDIA H100 PCIe",) * count, 1 if kind == "cpu" else None)


MACHINES = [("cpu", 1), ("cpu", 2), ("cpu", 3), ("cpu", 6), *[("cuda", n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 16)]]


@pytest.mark.parametrize(("kind", "count"), MACHINES)
def test_every_run_can_start_on_every_machine(kind, count):
    devices = machine(kind, count)
    modes = [mode for mode in modes_here(devices) if not mode.newer or mode.name not in refused_schedules()]
    runs = {mode.name: [*digits(devices), *mode.words] for mode in modes}
    for name, words in held_out_ways(devices):
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
    names = [check.name for check in right.checks(devices)]
    assert len({*names}) == len(names) and {"doctor", "repeat", "resume", "memory", "compile"} <= {*names}
    assert ("graphs" in names) == (kind == "cuda")
    assert ("sums" in names) == ("copies" in names) == (count > 1)


def test_pipelines_take_as_many_devices_as_divide():
    ranks = [next(w for w in pipeline(machine("cpu", n)) if w.startswith("nproc=")) for n in (2, 3, 4, 5, 8)]
    assert ranks == ["nproc=2", "nproc=2", "nproc=4", "nproc=4", "nproc=8"]


def runner(tmp_path, kind="cpu", count=2, answers=None, result=None, error=None):
    """A runner whose measurements answer so, and whose runs end so."""
    one = CheckRunner(tmp_path, machine(kind, count))
    one.measure = lambda what, count=1, **task: answers

    def train(name, words, environment=None, timed=False):
        if error is not None:
            raise error
        return result

    one.train = train
    return one


def test_patterns_that_nobody_compared_are_wrong(tmp_path):
    assert right.sums(runner(tmp_path, answers=[{"done": 0, "wrong": []}] * 2)).status == "wrong"
    bad = right.copies(
        runner(tmp_path, "cuda", 2, [{"done": 9, "wrong": ["cuda:0 to cuda:1: odd"]}, {"done": 9, "wrong": []}])
    )
    assert re.fullmatch("1 of 18 .*: cuda:0 to cuda:1: odd", bad.line) and "NCCL_P2P_DISABLE=1" in bad.todo
    good = right.copies(runner(tmp_path, answers=[{"done": 9, "wrong": []}] * 2))
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
    check = next(check for check in right.checks(machine("cpu", 2)) if check.name == "held out ddp")
    found = check.run(runner(tmp_path, result=result))
    assert says in found.line and found.status == ("right" if result == numbered() else "wrong")
    assert held_out.COUNT == 83


@pytest.mark.parametrize(
    ("mode", "code", "status"),
    [("zbv", 2, "not here"), ("zbv", 7, None), ("1f1b", 2, None), ("ddp", 2, None)],
)
def test_only_what_an_older_torch_lacks_may_be_refused(mode, code, status, tmp_path, monkeypatch):
    """Anything else that does not run is wrong: it must not be taken for something that this machine need not do."""
    monkeypatch.setattr(right, "single", lambda runner: None)
    check = next(check for check in right.checks(machine("cpu", 2)) if check.name == f"mode {mode}")
    one = runner(tmp_path, error=TrialFailed("needs torch 2.14", code))
    if status is None:
        with pytest.raises(TrialFailed):
            check.run(one)
    else:
        assert check.run(one) == Outcome("not here", "needs torch 2.14")


def test_memory_that_each_run_keeps_is_a_leak_and_one_that_settles_is_none(tmp_path):
    mib = 2**20
    found = right.memory(runner(tmp_path, answers=[{"host": [100 * mib, 150 * mib, 201 * mib]}]))
    assert found.status == "wrong" and re.search(r"\b50 MiB .*\bhost", found.line)
    found = right.memory(runner(tmp_path, "cuda", 1, [{"host": [100 * mib] * 3, "device": [0, 30 * mib, 60 * mib]}]))
    assert found.status == "wrong" and re.search(r"\b30 MiB .*\bdevice", found.line)
    found = right.memory(runner(tmp_path, answers=[{"host": [100 * mib, 160 * mib, 160 * mib]}]))
    assert found.status == "right" and found.figures["kept_bytes"] == {"host": 0}


def test_without_a_compiler_compiling_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr(right.shutil, "which", lambda name: None)
    found = right.compiled(runner(tmp_path))
    assert found.status == "not here" and "install g++" in found.line


@pytest.mark.parametrize(
    ("way", "different", "status"),
    [("replayed", [], "right"), ("replayed", ["weights"], "wrong"), ("launched", [], "wrong")],
)
def test_steps_that_were_not_replayed_prove_nothing(tmp_path, monkeypatch, way, different, status):
    monkeypatch.setattr(right, "traces", lambda path: path)
    monkeypatch.setattr(right, "different_bits", lambda one, other: different)
    one = runner(tmp_path, "cuda", 1, result={"graphs": way})
    found = right.replayed(one)
    assert found.status == status and all(word in found.line for word in different)


def test_what_doctor_finds_is_wrong(tmp_path):
    found = right.doctor(runner(tmp_path, answers=[{"problems": ["a full disk", "and more"]}]))
    assert found.status == "wrong" and re.fullmatch(r"a full disk.*\b1 .*", found.line)
    assert right.doctor(runner(tmp_path, answers=[{"problems": []}])).status == "right"

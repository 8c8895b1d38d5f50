"""Does this machine train correctly? Whole runs by the command line, compared with `single` and themselves."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args

from torch import Tensor

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, right, wrong
from trainer.commands.prove.prove_probe import COUNT, NAME
from trainer.commands.trials.engine import TrialFailed, steps_of
from trainer.launch import launching
from trainer.recipe.checks import SPLIT_BACKWARD
from trainer.recipe.schema import STREAMS, Schedule

STEPS, KILLED, SAVED = 20, 12, 5
START = {"cpu": 7.0, "cuda": 12.0}  # seconds, about, that a run of twenty small steps takes
# Relative: of a step's loss, of its gradient's norm, of a tensor of the optimizer's state and of one of the weights.
# An optimizer's state is made of gradients alone, and shows best whether they are right. CPUs differ by 1e-7 in all.
TOLERANCE = {
    "cpu": {"losses": 1e-4, "norms": 1e-3, "optimizer": 1e-3, "weights": 1e-4},
    "cuda": {"losses": 1e-3, "norms": 1e-2, "optimizer": 1e-2, "weights": 1e-3},
}
# The same of the precisions: what rounding to 8 and 11 bits does to twenty steps of this network, about four times.
ROUNDED = {
    "bf16": {"losses": 5e-3, "norms": 3e-2, "optimizer": 0.12, "weights": 1e-2},
    "fp16": {"losses": 2e-3, "norms": 2e-2, "optimizer": 0.08, "weights": 5e-3},
}
ADVICE = "train with a mode that is right, and paste proof.md into an issue"
EXACT = {launching.EXACT: "1"}
MIB = 2**20
LEAK = {"host": 24 * MIB, "device": 8 * MIB}  # bytes that one more run in the same program may keep


@dataclass(frozen=True)
class Mode:
    """A way to train: whether it computes what single does, and whether an older torch may refuse it."""

    name: str
    words: tuple[str, ...]
    same: bool = True
    newer: bool = False
    priority: int = 0


def digits(devices: Devices, model: str = "cnn_gn") -> list[str]:
    """Words of the twenty steps that all are compared with: no layer looks across a batch, so that modes can agree."""
    batch = 64 if 64 % devices.count == 0 else 24 * devices.count
    return [
        "recipe=digits", f"model.name={model}", f"batch_size={batch}", "optimizer.lr=0.001", "schedule.warmup_epochs=0",
        "schedule.name=constant", "augment.crop=none", f"max_steps={STEPS}", "epochs=3", "logging.every_steps=1",
        "logging.verdict=false", "save.every_epochs=1",
    ]  # fmt: skip


def checks(devices: Devices) -> Iterator[Check]:
    """All of it, in the order in which it is done."""
    count, start = devices.count, START[devices.kind]
    yield Check("doctor", "right", "what `doctor` checks", 12, doctor)
    if count > 1:
        yield Check("copies", "right", f"copies between all pairs of {devices.called(count)}, by pattern", 8, copies)
        yield Check("sums", "right", f"sums over {devices.called(count)}, by pattern", 8, sums)
    yield Check("repeat", "right", "two equal runs, bit by bit", 2 * start, repeat)
    yield Check("resume", "right", "killed at step 12 and resumed, bit by bit", 2 * start, resume)
    for mode in modes_here(devices):
        title = f"{STEPS} steps of {mode.name} against single" if mode.same else f"{STEPS} steps of {mode.name}"
        yield Check(f"mode {mode.name}", "right", title, start, partial(_mode, mode), mode.priority)
    for name, words in held_out_ways(devices):
        title = f"each held-out image once, in {name}"
        yield Check(f"held out {name}", "right", title, start, partial(_held_out, name, words), 1)
    for name in ROUNDED:
        yield Check(f"precision {name}", "right", f"{name} against fp32", start, partial(_precision, name))
    if devices.kind == "cuda":
        yield Check("graphs", "right", "replayed steps against launched ones, bit by bit", 2 * start, replayed)
    slow = 25 if devices.kind == "cuda" else 45
    yield Check("compile", "right", "compile=true against the same without", 2 * start + slow, compiled, 1)
    yield Check("memory", "right", "memory is freed", 3 * start, memory)


def doctor(runner: CheckRunner) -> Outcome:
    problems = runner.measure("doctor")[0]["problems"]
    if problems:
        more = f", and {len(problems) - 1} more" * (len(problems) > 1)
        return wrong(problems[0] + more, "python -m trainer doctor", problems=problems)
    return right("nothing is wrong with software, devices, memory and limits", problems=[])


def copies(runner: CheckRunner) -> Outcome:
    return _patterns(runner, "copies", "set NCCL_P2P_DISABLE=1, or switch the IOMMU or PCIe ACS off")


def sums(runner: CheckRunner) -> Outcome:
    return _patterns(runner, "sums", "set NCCL_P2P_DISABLE=1 (and NCCL_SHM_DISABLE=1 if that is not enough)")


def _patterns(runner: CheckRunner, what: str, todo: str) -> Outcome:
    answers = runner.measure(what, runner.devices.count)
    done, bad = sum(answer["done"] for answer in answers), [line for answer in answers for line in answer["wrong"]]
    todo = todo if runner.devices.kind == "cuda" else "test the machine's memory, and install torch again"
    if bad:
        return wrong(f"{len(bad)} of {done} were wrong: {bad[0]}", todo, done=done, wrong=bad)
    if not done:
        return wrong("nothing was compared", ADVICE, done=0, wrong=[])
    return right(f"{done} arrived correctly, every element, in several types and sizes", done=done, wrong=[])


def single(runner: CheckRunner, name: str = "single", *words: str, model: str = "cnn_gn") -> Traces:
    """The twenty steps of mode=single."""
    runner.train(name, [*digits(runner.devices, model), "mode=single", *runner.devices.first(), *words], EXACT)
    return traces(runner.path(name))


def _deterministic(runner: CheckRunner) -> list[str]:
    return ["deterministic=true"] * (runner.devices.kind == "cuda")


def repeat(runner: CheckRunner) -> Outcome:
    first, second = (single(runner, f"repeat/{number}", *_deterministic(runner)) for number in (1, 2))
    todo = "test the memory and the card: a machine whose results vary cannot be trusted"
    return same_bits(second, first, "an equal run", todo)


def resume(runner: CheckRunner) -> Outcome:
    whole = single(runner, "repeat/1", *_deterministic(runner))
    path = runner.path("resume")
    shutil.rmtree(path, ignore_errors=True)
    words = [*digits(runner.devices), "mode=single", *runner.devices.first(), *_deterministic(runner)]
    words.append(f"save.every_steps={SAVED}")
    code = 0
    try:
        runner.train("resume", words, {**EXACT, "TRAINER_FAULT": f"kill@0:{KILLED}"}, resumes=True)
    except TrialFailed as error:
        code = error.code
    if code != 137:
        raise TrialFailed(f"it should have been killed by SIGKILL but ended with {code}: see resume.log", 1)
    runner.train("resume", words, EXACT, resumes=True)
    todo = "train without resume=auto, and paste proof.md into an issue"
    return same_bits(traces(path), whole, "the run that was not killed", todo)


def modes_here(devices: Devices) -> Iterator[Mode]:
    """Every mode, and every schedule, that these devices can run."""
    count = devices.count
    several = max(2, min(count, 4))  # the network has seven blocks to cut between
    yield Mode("dp", ("mode=dp", *devices.in_one_process(max(2, count))))
    yield Mode("split", ("mode=split", *devices.in_one_process(several)))
    yield Mode(STREAMS, ("mode=pipeline", *devices.in_one_process(several), "pipeline.microbatches=4"))
    if count > 1:
        yield Mode("ddp", ("mode=ddp", *devices.in_ranks(count)))
        yield Mode("fsdp", ("mode=fsdp", *devices.in_ranks(count)), priority=1)
        for schedule in get_args(Schedule):
            if schedule != STREAMS:
                words = (*pipeline(devices), f"pipeline.schedule={schedule}", "pipeline.microbatches=4")
                priority = 0 if schedule in ("1f1b", "gpipe") else 2
                yield Mode(schedule, words, newer=schedule in SPLIT_BACKWARD, priority=priority)
    workers = devices.in_ranks(count) if count > 1 else [f"devices=[{devices.names[0]}]", "nproc=2"]
    yield Mode("local_sgd", ("mode=local_sgd", *workers), same=False)
    yield Mode("hogwild", ("mode=hogwild", "nproc=2", "threads=1"), same=False)


def pipeline(devices: Devices) -> list[str]:
    """Words of pipelines of two stages over as many devices as divide; several pipelines share a batch."""
    return ["mode=pipeline", *devices.in_ranks(devices.count // 2 * 2), "pipeline.stages=2"]


def _mode(mode: Mode, runner: CheckRunner) -> Outcome:
    expected, name = single(runner), f"modes/{mode.name}"
    try:
        runner.train(name, [*digits(runner.devices), *mode.words], EXACT)
    except TrialFailed as error:
        if mode.newer and error.code == 2:  # a schedule that this torch does not have
            return Outcome("not here", str(error))
        raise
    actual = traces(runner.path(name))
    if mode.same:
        return compared(actual, expected, TOLERANCE[runner.devices.kind], ADVICE)
    first, last = sum(actual.losses[:5]) / 5, sum(actual.losses[-5:]) / 5
    if not last < first or len(actual.losses) < STEPS:
        return wrong(f"the loss does not fall: {first:.3f}, then {last:.3f}", ADVICE, first=first, last=last)
    return right(f"different maths from single; the loss falls from {first:.3f} to {last:.3f}", first=first, last=last)


def held_out_ways(devices: Devices) -> Iterator[tuple[str, list[str]]]:
    """Modes that divide the images of an evaluation differently."""
    yield "single", ["mode=single", *devices.first()]
    if devices.count > 1:
        yield "ddp", ["mode=ddp", *devices.in_ranks(devices.count)]
        yield "pipeline", pipeline(devices)


def _held_out(name: str, mode: Sequence[str], runner: CheckRunner) -> Outcome:
    words = [
        "plugin=trainer.commands.prove.prove_probe", f"data.name={NAME}", "model.name=zeros", "task.name=regression",
        "optimizer.lr=1e-30", "max_steps=1", "epochs=1", f"batch_size={24 * runner.devices.count}",
        "logging.tensorboard=false", "logging.verdict=false", *mode,
    ]  # fmt: skip
    result = runner.train(f"held-out/{name}", words)
    found = [result["data"]["val_samples"], COUNT * result["val_mae"], COUNT * result["val_loss"]]
    expected = [COUNT, sum(range(COUNT + 1)), sum(n * n for n in range(COUNT + 1))]
    bad = [
        f"{what} {actual:g} instead of {wanted}"
        for what, actual, wanted in zip(("images", "sum of numbers", "sum of squares"), found, expected, strict=True)
        if not math.isclose(actual, wanted, rel_tol=1e-6)
    ]
    if bad:
        return wrong(f"not each once: {', '.join(bad)}", "evaluate with mode=single", found=found)
    return right(f"each of {COUNT} images was counted once", found=found)


def _precision(name: str, runner: CheckRunner) -> Outcome:
    expected, actual = single(runner), single(runner, f"precision/{name}", f"precision={name}")
    return compared(actual, expected, ROUNDED[name], f"train with precision=fp32 instead of {name}")


def replayed(runner: CheckRunner) -> Outcome:
    launched = single(runner, "graphs/launched", "graphs=false", *_deterministic(runner))
    words = [*digits(runner.devices), "mode=single", *runner.devices.first(), "graphs=true", *_deterministic(runner)]
    way = runner.train("graphs/replayed", words, EXACT)["graphs"]
    if way != "replayed":
        return wrong("the steps could not be recorded: the run's output says why", "train with graphs=false", way=way)
    todo = "train with graphs=false, and paste proof.md into an issue"
    return same_bits(traces(runner.path("graphs/replayed")), launched, "launched steps", todo)


def compiled(runner: CheckRunner) -> Outcome:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "gcc", "clang")):
        return Outcome("not here", "no C++ compiler is here, which compile=true needs: install g++")
    model = "cnn_gn" if runner.devices.kind == "cuda" else "mlp"  # the CPU's compiler is slow
    expected = single(runner) if model == "cnn_gn" else single(runner, "compile/without", model=model)
    actual = single(runner, "compile/with", "compile=true", model=model)
    return compared(actual, expected, TOLERANCE[runner.devices.kind], "train with compile=false")


def memory(runner: CheckRunner) -> Outcome:
    """What runs in one program leave of the host's and the device's memory, and what all runs left in /dev/shm."""
    blocks, devices = _blocks(), runner.devices
    words = [*digits(devices)[1:], "mode=single", *devices.first()]
    sizes = runner.measure("memory", recipe="digits", words=words)[0]
    if devices.count > 1:
        runner.train("memory", [*digits(devices), "mode=local_sgd", *devices.in_ranks(devices.count)])
    left = sorted(_orphans(blocks))
    kept = {kind: min(b - a for a, b in pairwise(values)) for kind, values in sizes.items()}
    bad = [
        f"each run keeps {size / MIB:.0f} MiB of the {kind}'s memory"
        for kind, size in kept.items()
        if size > LEAK[kind]
    ]
    bad += [f"left in /dev/shm: {', '.join(left[:3])}"] * bool(left)
    figures = {"kept_bytes": kept, "shared_memory_left": left}
    if bad:
        todo = "train in separate processes (python -m trainer), which free everything"
        return wrong("; ".join(bad), todo, **figures)
    return right(f"a run leaves nothing in the memory of the {' and the '.join(kept)}, and in /dev/shm", **figures)


def _blocks() -> set[str]:
    """Shared memory of this user, but for semaphores."""
    with suppress(OSError), os.scandir("/dev/shm") as entries:
        mine = [entry for entry in entries if entry.is_file() and entry.stat().st_uid == os.getuid()]
        return {entry.name for entry in mine if not entry.name.startswith("sem.")}
    return set()


def _orphans(before: set[str]) -> set[str]:
    """Blocks that are new and that no living process maps; other programs have some too."""
    left = _blocks() - before
    for pid in filter(str.isdigit, os.listdir("/proc")) if left else ():
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            left -= {name for name in left if name in maps}
    return left & _blocks()


# --- what twenty steps leave ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """Of a run: losses and gradients' norms step by step, and its weights and optimizer's state at the end."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def traces(path: Path) -> Traces:
    from trainer.saving import checkpoint
    from trainer.telemetry.events import curves_of

    newest = checkpoint.newest(path, lambda line: None)
    if newest is None:
        raise TrialFailed("the run left no checkpoint", 1)
    weights, optimizer = (
        {name: tensor.read() for name, tensor in newest.state.part(part).items()} for part in ("model", "optimizer")
    )
    norms = curves_of(path).get("train/grad_norm", ([], [], []))[2]
    return Traces([float(row["train_loss"]) for row in steps_of(path)], norms, weights, optimizer)


def differences(actual: Traces, expected: Traces) -> dict[str, float]:
    """How far two runs are apart: the largest relative differences, infinite where one has what the other lacks."""
    return {
        "losses": _of_numbers(actual.losses, expected.losses),
        "norms": _of_numbers(actual.norms, expected.norms),
        "optimizer": _of_tensors(actual.optimizer, expected.optimizer),
        "weights": _of_tensors(actual.weights, expected.weights),
    }


def _largest(values: Sequence[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.inf


def _of_numbers(actual: Sequence[float], expected: Sequence[float]) -> float:
    if len(actual) != len(expected) or len(expected) < STEPS:
        return math.inf
    return _largest([abs(a - b) / max(abs(b), 1e-12) for a, b in zip(actual, expected, strict=True)])


def _of_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of a tensor relative to its own norm, or to a thousandth of that of all together."""
    if not expected or {name: t.shape for name, t in actual.items()} != {name: t.shape for name, t in expected.items()}:
        return math.inf
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least = 1e-3 * math.hypot(*norms.values()) or 1e-12
    return _largest([float((actual[n].double() - t.double()).norm()) / (norms[n] + least) for n, t in expected.items()])


def compared(actual: Traces, expected: Traces, bounds: Mapping[str, float], todo: str) -> Outcome:
    """Whether two runs' traces are within bounds of each other."""
    apart = differences(actual, expected)
    figures = {
        "deviations": {name: value if math.isfinite(value) else None for name, value in apart.items()},
        "bounds": dict(bounds),
    }
    if beyond := [name for name, value in apart.items() if not value <= bounds[name]]:
        parts = ", ".join(f"{name} by {apart[name]:.2g} (at most {bounds[name]:g})" for name in beyond)
        return wrong(f"differs: {parts}", todo, **figures)
    if not any(apart.values()):
        return right("the same to the last bit", **figures)
    line = ", ".join(f"{name} {value:.0e}" if value else f"{name} 0" for name, value in apart.items())
    return right(f"relative differences: {line}", **figures)


def same_bits(actual: Traces, expected: Traces, other: str, todo: str) -> Outcome:
    """Whether two runs left the same to the last bit."""
    different = [name for name, apart in differences(actual, expected).items() if apart]
    if different := different if len(expected.losses) == STEPS else ["steps"]:
        return wrong(f"{', '.join(different)} differ from {other}", todo, different=different)
    return right("losses, norms, weights and optimizer state are the same to the last bit", different=[])

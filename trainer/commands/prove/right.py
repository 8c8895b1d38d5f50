"""Does this machine train correctly? Whole runs by the command line, compared with `single` and themselves."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, right, wrong
from trainer.commands.prove.held_out import COUNT, NAME
from trainer.commands.prove.traces import STEPS, Traces, compared, different_bits, traces
from trainer.commands.trials.engine import TrialFailed, failure_line
from trainer.launch import launching
from trainer.recipe.checks import SPLIT_BACKWARD
from trainer.recipe.schema import STREAMS, Schedule

KILLED, SAVED = 12, 5  # steps
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
        count_once = partial(_held_out, name, words)
        yield Check(f"held out {name}", "right", f"each held-out image once, in {name}", start, count_once, 1)
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
    if different := different_bits(second, first):
        todo = "test the memory and the card: a machine whose results vary cannot be trusted"
        return wrong(f"{', '.join(different)} differ between two equal runs", todo, different=different)
    return right("losses, norms, weights and optimizer state are the same to the last bit", different=[])


def resume(runner: CheckRunner) -> Outcome:
    whole = single(runner, "repeat/1", *_deterministic(runner))
    path = runner.path("resume")
    shutil.rmtree(path, ignore_errors=True)
    words = [*digits(runner.devices), "mode=single", *runner.devices.first(), *_deterministic(runner)]
    words += [f"save.every_steps={SAVED}", f"output={path}", "logging.progress=false"]
    code = runner.trainer("killed", words, {**EXACT, "TRAINER_FAULT": f"kill@0:{KILLED}"})
    if code != 137:
        line = failure_line(runner.log("killed"), code)
        raise TrialFailed(f"it should have been killed by SIGKILL but ended with {code}: {line}", 1)
    code = runner.trainer("resumed", [*words, "resume=auto"], EXACT)
    if code:
        raise TrialFailed(failure_line(runner.log("resumed"), code), code)
    if different := different_bits(traces(path), whole):
        todo = "train without resume=auto, and paste proof.md into an issue"
        return wrong(f"{', '.join(different)} differ from the run that was not killed", todo, different=different)
    return right("the same to the last bit as the run that was not killed", different=[])


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
        "plugin=trainer.commands.prove.held_out", f"data.name={NAME}", "model.name=zeros", "task.name=regression",
        "optimizer.lr=1e-30", "max_steps=1", "epochs=1", f"batch_size={24 * runner.devices.count}",
        "logging.tensorboard=false", "logging.verdict=false", *mode,
    ]  # fmt: skip
    result = runner.train(f"held-out/{name}", words)
    sums = [result["data"]["val_samples"], COUNT * result["val_mae"], COUNT * result["val_loss"]]
    expected = [COUNT, sum(range(COUNT + 1)), sum(n * n for n in range(COUNT + 1))]
    names = ("images", "sum of numbers", "sum of squares")
    bad = [
        f"{what} {actual:g} instead of {wanted}"
        for what, actual, wanted in zip(names, sums, expected, strict=True)
        if not math.isclose(actual, wanted, rel_tol=1e-6)
    ]
    if bad:
        return wrong(f"not each once: {', '.join(bad)}", "evaluate with mode=single", found=sums)
    return right(f"each of {COUNT} images was counted once", found=sums)


def _precision(name: str, runner: CheckRunner) -> Outcome:
    expected, actual = single(runner), single(runner, f"precision/{name}", f"precision={name}")
    return compared(actual, expected, ROUNDED[name], f"train with precision=fp32 instead of {name}")


def replayed(runner: CheckRunner) -> Outcome:
    launched = single(runner, "graphs/launched", "graphs=false", *_deterministic(runner))
    words = [*digits(runner.devices), "mode=single", *runner.devices.first(), "graphs=true", *_deterministic(runner)]
    way = runner.train("graphs/replayed", words, EXACT)["graphs"]
    if way != "replayed":
        return wrong("the steps could not be recorded: the run's output says why", "train with graphs=false", way=way)
    if different := different_bits(traces(runner.path("graphs/replayed")), launched):
        todo = "train with graphs=false, and paste proof.md into an issue"
        return wrong(f"{', '.join(different)} differ from launched steps", todo, different=different)
    return right("losses, norms, weights and optimizer state are the same to the last bit", different=[])


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
    figures = {"kept_bytes": kept, "shared_memory_left": left}
    bad = [
        f"each run keeps {kept[kind] / MIB:.0f} MiB of the {kind}'s memory" for kind in kept if kept[kind] > LEAK[kind]
    ]
    bad += [f"left in /dev/shm: {', '.join(left[:3])}"] * bool(left)
    if bad:
        todo = "train in separate processes (python -m trainer), which free everything"
        return wrong("; ".join(bad), todo, **figures)
    where = "the host, the device" if "device" in kept else "the host"
    return right(f"a run leaves nothing in the memory of {where} and in /dev/shm", **figures)


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

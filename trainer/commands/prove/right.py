"""Does this machine train right? Whole runs by the command line, held against `mode=single` and against themselves."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import get_args

from trainer.commands.compare.running import Failed, failure_line
from trainer.commands.prove.held_out import COUNT, NAME
from trainer.commands.prove.outcome import Check, Outcome, right, wrong
from trainer.commands.prove.traces import STEPS, Traces, held, same_bits, traces
from trainer.commands.prove.trip import Devices, Trip
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
REPORT = "train with a mode that is right, and paste proof.md into an issue"


def digits(devices: Devices, model: str = "cnn_gn") -> list[str]:
    """Words of the twenty steps that all are held against: no layer looks across a batch, so that modes can agree."""
    batch = 64 if 64 % devices.count == 0 else 24 * devices.count
    return [
        "recipe=digits", f"model.name={model}", f"batch_size={batch}", "optimizer.lr=0.001", "schedule.warmup_epochs=0",
        "schedule.name=constant", "augment.crop=none", f"max_steps={STEPS}", "epochs=3", "logging.every_steps=1",
        "logging.verdict=false", "save.every_epochs=1",
    ]  # fmt: skip


def checks(devices: Devices) -> Iterator[Check]:
    """All of it, in the order in which it is done."""
    count, modes, start = devices.count, list(modes_here(devices)), START[devices.kind]
    yield Check("doctor", "right", "what `doctor` looks at", 12, doctor)
    if count > 1:
        yield Check("copies", "right", f"copies between all pairs of {devices.called(count)}, by pattern", 8, copies)
        yield Check("sums", "right", f"sums over {devices.called(count)}, by pattern", 8, sums)
    yield Check("repeat", "right", "two equal runs, bit by bit", 2 * start, repeat)
    yield Check("resume", "right", "killed at step 12 and resumed, bit by bit", 2 * start, resume)
    for mode in modes:
        title = f"{STEPS} steps of {mode.name} against single" if mode.same else f"{STEPS} steps of {mode.name}"
        yield Check(f"mode {mode.name}", "right", title, start, _of_mode(mode), mode.rank)
    for name, words in held_out_ways(devices):
        yield Check(f"held out {name}", "right", f"each held-out image once, in {name}", start, _counts(name, words), 1)
    for precision in ROUNDED:
        yield Check(f"precision {precision}", "right", f"{precision} against fp32", start, _rounds(precision))
    slow = 25 if devices.kind == "cuda" else 45
    yield Check("compile", "right", "compile=true against the same without", 2 * start + slow, compiled, 1)
    yield Check("memory", "right", "memory is given back", 3 * start, memory)


# --- before any training ----------------------------------------------------------------------------------------------


def doctor(trip: Trip) -> Outcome:
    problems = trip.measure("doctor")[0]["problems"]
    if problems:
        more = f", and {len(problems) - 1} more" * (len(problems) > 1)
        return wrong(problems[0] + more, "python -m trainer doctor", problems=problems)
    return right("nothing is wrong with software, devices, memory and limits", problems=[])


def copies(trip: Trip) -> Outcome:
    return _patterns(trip, "copies", "set NCCL_P2P_DISABLE=1, or switch the IOMMU or PCIe ACS off")


def sums(trip: Trip) -> Outcome:
    return _patterns(trip, "sums", "set NCCL_P2P_DISABLE=1 (and NCCL_SHM_DISABLE=1 if that is not enough)")


def _patterns(trip: Trip, what: str, todo: str) -> Outcome:
    answers = trip.measure(what, trip.devices.count)
    done, bad = sum(answer["done"] for answer in answers), [line for answer in answers for line in answer["wrong"]]
    todo = todo if trip.devices.kind == "cuda" else "test the machine's memory, and install torch anew"
    if bad:
        return wrong(f"{len(bad)} of {done} came out wrong: {bad[0]}", todo, done=done, wrong=bad)
    if not done:
        return wrong("nothing was compared", REPORT, done=0, wrong=[])
    return right(f"{done} arrived as they should, every element, in several types and sizes", done=done, wrong=[])


# --- the same again ---------------------------------------------------------------------------------------------------


EXACT = {launching.EXACT: "1"}


def reference(trip: Trip, name: str = "single", *words: str, model: str = "cnn_gn") -> Traces:
    """The twenty steps of mode=single."""
    trip.train(name, [*digits(trip.devices, model), "mode=single", *trip.devices.one(), *words], EXACT)
    return traces(trip.path(name))


def _strict(trip: Trip) -> list[str]:
    return ["deterministic=true"] * (trip.devices.kind == "cuda")


def repeat(trip: Trip) -> Outcome:
    one, two = (reference(trip, f"repeat/{number}", *_strict(trip)) for number in (1, 2))
    different = same_bits(two, one)
    if different:
        todo = "test the memory and the card: a machine that computes otherwise each time cannot be trusted"
        return wrong(f"{', '.join(different)} differ between two equal runs", todo, different=different)
    return right("losses, norms, weights and optimizer state are the same to the last bit", different=[])


def resume(trip: Trip) -> Outcome:
    whole = reference(trip, "repeat/1", *_strict(trip))
    path = trip.path("resume")
    shutil.rmtree(path, ignore_errors=True)
    words = [*digits(trip.devices), "mode=single", *trip.devices.one(), *_strict(trip), f"save.every_steps={SAVED}"]
    words += [f"output={path}", "logging.progress=false"]
    code = trip.trainer("killed", words, {**EXACT, "TRAINER_FAULT": f"kill@0:{KILLED}"})
    if code != 137:
        raise Failed(
            f"it was to be killed by SIGKILL and ended with {code}: {failure_line(trip.log('killed'), code)}", 1
        )
    code = trip.trainer("resumed", [*words, "resume=auto"], EXACT)
    if code:
        raise Failed(failure_line(trip.log("resumed"), code), code)
    different = same_bits(traces(path), whole)
    if different:
        todo = "train without resume=auto, and paste proof.md into an issue"
        return wrong(f"{', '.join(different)} differ from the run that was not killed", todo, different=different)
    return right("the same to the last bit as the run that was not killed", different=[])


# --- modes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way to train: whether it computes what single does, and whether an older torch may refuse it."""

    name: str
    words: tuple[str, ...]
    same: bool = True
    newer: bool = False
    rank: int = 0


def modes_here(devices: Devices) -> Iterator[Mode]:
    """Every mode, and every schedule, that these devices can run."""
    count = devices.count
    several = max(2, min(count, 4))  # the network has seven blocks to cut between
    yield Mode("dp", ("mode=dp", *devices.in_one_process(max(2, count))))
    yield Mode("split", ("mode=split", *devices.in_one_process(several)))
    yield Mode(STREAMS, ("mode=pipeline", *devices.in_one_process(several), "pipeline.microbatches=4"))
    if count > 1:
        yield Mode("ddp", ("mode=ddp", *devices.in_ranks(count)))
        ranks, stages = pipes(count)
        for schedule in get_args(Schedule):
            if schedule != STREAMS:
                more = (f"pipeline.schedule={schedule}", f"pipeline.stages={stages}", "pipeline.microbatches=4")
                usual, newer = schedule in ("1f1b", "gpipe"), schedule in SPLIT_BACKWARD
                words = ("mode=pipeline", *devices.in_ranks(ranks), *more)
                yield Mode(schedule, words, newer=newer, rank=0 if usual else 2)
    workers = devices.in_ranks(count) if count > 1 else [f"devices=[{devices.names[0]}]", "nproc=2"]
    yield Mode("local_sgd", ("mode=local_sgd", *workers), same=False)
    yield Mode("hogwild", ("mode=hogwild", "nproc=2", "threads=1"), same=False)


def pipes(count: int) -> tuple[int, int]:
    """How many of the devices form pipelines, and the stages of each; several pipelines share a batch."""
    return count // 2 * 2, 2


def _of_mode(mode: Mode) -> Callable[[Trip], Outcome]:
    def check(trip: Trip) -> Outcome:
        expected = reference(trip)
        name = f"modes/{mode.name}"
        try:
            trip.train(name, [*digits(trip.devices), *mode.words], EXACT)
        except Failed as error:
            if mode.newer and error.code == 2:  # of a schedule that this torch has not
                return Outcome("not here", str(error))
            raise
        found = traces(trip.path(name))
        if mode.same:
            return held(found, expected, TOLERANCE[trip.devices.kind], REPORT)
        first, last = sum(found.losses[:5]) / 5, sum(found.losses[-5:]) / 5
        if not last < first or len(found.losses) < STEPS:
            return wrong(f"the loss does not fall: {first:.3f}, then {last:.3f}", REPORT, first=first, last=last)
        return right(f"other maths than single; the loss falls from {first:.3f} to {last:.3f}", first=first, last=last)

    return check


def held_out_ways(devices: Devices) -> Iterator[tuple[str, list[str]]]:
    """Modes whose evaluations divide the images in ways of their own."""
    yield "single", ["mode=single", *devices.one()]
    if devices.count > 1:
        ranks, stages = pipes(devices.count)
        yield "ddp", ["mode=ddp", *devices.in_ranks(devices.count)]
        yield "pipeline", ["mode=pipeline", *devices.in_ranks(ranks), f"pipeline.stages={stages}"]


def _counts(name: str, mode: Sequence[str]) -> Callable[[Trip], Outcome]:
    def check(trip: Trip) -> Outcome:
        words = ["plugin=trainer.commands.prove.held_out", f"data.name={NAME}", "model.name=nought"]
        words += ["task.name=regression"]
        words += ["optimizer.lr=1e-30", "max_steps=1", "epochs=1", f"batch_size={24 * trip.devices.count}"]
        words += ["logging.tensorboard=false", "logging.verdict=false", *mode]
        result = trip.train(f"held-out/{name}", words)
        found = [result["data"]["val_samples"], COUNT * result["val_mae"], COUNT * result["val_loss"]]
        expected = [COUNT, sum(range(COUNT + 1)), sum(n * n for n in range(COUNT + 1))]
        names = ("images", "sum of numbers", "sum of squares")
        bad = [
            f"{what} {a:g} instead of {b}"
            for what, a, b in zip(names, found, expected, strict=True)
            if not math.isclose(a, b, rel_tol=1e-6)
        ]
        if bad:
            return wrong(f"not each once: {', '.join(bad)}", "evaluate with mode=single", found=found)
        return right(f"each of {COUNT} images was counted once", found=found)

    return check


# --- precisions, compilation, memory ----------------------------------------------------------------------------------


def _rounds(precision: str) -> Callable[[Trip], Outcome]:
    def check(trip: Trip) -> Outcome:
        expected = reference(trip)
        found = reference(trip, f"precision/{precision}", f"precision={precision}")
        return held(found, expected, ROUNDED[precision], f"train with precision=fp32 instead of {precision}")

    return check


def compiled(trip: Trip) -> Outcome:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "gcc", "clang")):
        return Outcome("not here", "no C++ compiler is here, which compile=true needs: install g++")
    model = "cnn_gn" if trip.devices.kind == "cuda" else "mlp"  # the CPU's compiler is slow
    plain = reference(trip) if model == "cnn_gn" else reference(trip, "compile/without", model=model)
    found = reference(trip, "compile/with", "compile=true", model=model)
    return held(found, plain, TOLERANCE[trip.devices.kind], "train with compile=false")


MIB = 2**20
LEAK = {"host": 24 * MIB, "device": 8 * MIB}  # bytes that one more run in the same program may keep


def memory(trip: Trip) -> Outcome:
    """What runs in one program leave of the host's and the device's memory, and what all runs left in /dev/shm."""
    blocks = _blocks()
    words = [*digits(trip.devices)[1:], "mode=single", *trip.devices.one()]
    answer = trip.measure("memory", recipe="digits", words=words)[0]
    if trip.devices.count > 1:
        trip.train("memory", [*digits(trip.devices), "mode=local_sgd", *trip.devices.in_ranks(trip.devices.count)])
    left = sorted(_orphans(blocks))
    kept = {kind: min(b - a for a, b in pairwise(sizes)) for kind, sizes in answer.items()}
    figures = {"kept_bytes": kept, "shared_memory_left": left}
    bad = [
        f"each run keeps {size / MIB:.0f} MiB of the {kind}'s memory"
        for kind, size in kept.items()
        if size > LEAK[kind]
    ]
    bad += [f"left in /dev/shm: {', '.join(left[:3])}"] * bool(left)
    if bad:
        return wrong(
            "; ".join(bad), "train in processes of their own (python -m trainer), which give all back", **figures
        )
    places = ["the host", *["the device"] * ("device" in kept), "/dev/shm"]
    return right(f"a run leaves nothing in the memory of {', '.join(places[:-1])} and in {places[-1]}", **figures)


def _blocks() -> set[str]:
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

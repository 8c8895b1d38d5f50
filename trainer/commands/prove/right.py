"""Checks of correctness: does this machine train correctly?

Most checks start a whole run through the command line, and compare it with a run of `mode=single`
or with an identical run. The others run `doctor`, or copy and sum test patterns across devices.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from torch import Tensor

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, right, wrong
from trainer.commands.trials.engine import TrialFailed, read_steps_file
from trainer.commands.trials.significance import compute_deviation
from trainer.launch import launching
from trainer.recipe import TRAITS
from trainer.recipe.checks import SPLIT_BACKWARD
from trainer.recipe.schema import STREAMS, Schedule
from trainer.saving.files import Json

# Number of steps of a run, the step at which the killed run gets SIGKILL, and the number of steps
# between its checkpoints.
STEPS = 20
KILLED = 12
SAVED = 5
# Approximate seconds of a run of STEPS steps of a small network, by the kind of device.
START = {"cpu": 7.0, "cuda": 12.0}
# Allowed relative differences: of a step's loss, of the norm of its gradient, of a tensor of the
# optimizer's state, and of a weight. An optimizer's state depends on gradients alone, so it shows
# best whether gradients are right. Correct CPU runs differ by 1e-7 in all four.
TOLERANCE = {
    "cpu": {"losses": 1e-4, "norms": 1e-3, "optimizer": 1e-3, "weights": 1e-4},
    "cuda": {"losses": 1e-3, "norms": 1e-2, "optimizer": 1e-2, "weights": 1e-3},
}
# Allowed differences from fp32: about four times the changes that rounding to 8 or 11 bits causes
# within twenty steps.
ROUNDED = {
    "bf16": {"losses": 5e-3, "norms": 3e-2, "optimizer": 0.12, "weights": 1e-2},
    "fp16": {"losses": 2e-3, "norms": 2e-2, "optimizer": 0.08, "weights": 5e-3},
}
ADVICE = "train with a mode that is right, and paste proof.md into an issue"


@dataclass(frozen=True)
class Mode:
    """A mode or schedule to check.

    Attributes:
        name: name of the mode or schedule.
        words: arguments that select it.
        same: whether it must compute what `single` computes.

        priority: `Check.priority` of the check that trains with this mode.
    """

    name: str
    words: tuple[str, ...]
    same: bool = True

    priority: int = 0


@dataclass(frozen=True)
class Traces:
    """Results of a run that are compared.

    Attributes:
        losses: training loss of each step.
        norms: norm of the gradient of each step.
        weights: weights at the end, by name.
        optimizer: tensors of the optimizer's state at the end, by name.
    """

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def list_arguments(devices: Devices) -> list[str]:
    """Return the arguments that all runs of `STEPS` steps have in common.

    The layers of `cnn_gn` treat each image on its own. So losses and gradients do not depend on how
    a mode divides a batch, and can be compared with those of `single`.
    """
    batch = 64 if 64 % devices.count == 0 else 24 * devices.count
    return [
        "recipe=digits",
        "model.name=cnn_gn",
        f"batch_size={batch}",
        "optimizer.lr=0.001",
        "schedule.warmup_epochs=0",
        "schedule.name=constant",
        "augment.crop=none",
        f"max_steps={STEPS}",
        "epochs=3",
        "logging.every_steps=1",
        "logging.verdict=false",
        "save.every_epochs=1",
    ]


def list_checks(devices: Devices) -> Iterator[Check]:
    """Yield all checks of correctness, in the order in which they run."""
    count = devices.count
    start = START[devices.kind]
    yield Check("doctor", "what `doctor` checks", 12, doctor)
    if count > 1:
        title = f"copies between all pairs of {devices.called(count)}, by pattern"
        yield Check("copies", title, 8, copies)
        yield Check("sums", f"sums over {devices.called(count)}, by pattern", 8, sums)
    yield Check("repeat", "two equal runs, bit by bit", 2 * start, repeat)
    yield Check("verify", "steps computed twice, bit by bit", start, verify, 1)
    yield Check("resume", "killed at step 12 and resumed, bit by bit", 2 * start, resume)
    for mode in list_modes(devices):
        title = f"{STEPS} steps of {mode.name}"
        if mode.same:
            title += " against single"
        run = partial(_check_mode, mode)
        yield Check(f"mode {mode.name}", title, start, run, mode.priority)
    for precision in ROUNDED:
        title = f"{precision} against fp32"
        run = partial(_check_precision, precision)
        yield Check(f"precision {precision}", title, start, run)
    # Approximate seconds of compilation, which takes longer for the CPU.
    compiling = 45
    if devices.kind == "cuda":
        title = "CUDA graph replay against eager steps, bit by bit"
        yield Check("graphs", title, 2 * start, check_graphs)
        compiling = 25
    title = "compile=true against the same without"
    yield Check("compile", title, 2 * start + compiling, check_compile, 1)


def doctor(runner: CheckRunner) -> Outcome:
    problems = runner.measure("doctor")[0]["problems"]
    if problems:
        return wrong("; ".join(problems), "python -m trainer doctor", problems=problems)
    return right("software, devices, memory and limits have no problem", problems=[])


def _check_patterns(what: str, todo: str, runner: CheckRunner) -> Outcome:
    count = 0
    errors = []
    for answer in runner.measure(what, runner.devices.count):
        count += answer["done"]
        errors += answer["wrong"]
    if runner.devices.kind != "cuda":
        todo = "test the machine's memory, and install torch again"
    if errors:
        line = f"{len(errors)} of {count} were wrong: {errors[0]}"
        return wrong(line, todo, done=count, wrong=errors)
    # A check without a comparison must not pass.
    if not count:
        return wrong("nothing was compared", ADVICE, done=0, wrong=[])
    line = f"{count} arrived correctly, every element, in several types and sizes"
    return right(line, done=count, wrong=[])


copies = partial(
    _check_patterns, "copies", "set NCCL_P2P_DISABLE=1, or switch the IOMMU or PCIe ACS off"
)
sums = partial(
    _check_patterns, "sums", "set NCCL_P2P_DISABLE=1 (and NCCL_SHM_DISABLE=1 if that is not enough)"
)


def train(
    runner: CheckRunner,
    name: str,
    words: Sequence[str],
    fault: str = "",
    resumes: bool = False,
) -> Json:
    """Train twenty steps, and return the content of result.json.

    The run has mode=single on the first device, unless the arguments `words` say otherwise.
    """
    environment = {launching.EXACT: "1", "TRAINER_FAULT": fault}
    single = ["mode=single", *runner.devices.in_one_process()]
    arguments = [*list_arguments(runner.devices), *single, *words]
    return runner.train(name, arguments, environment, resumes=resumes)


def trace(runner: CheckRunner, name: str, *words: str) -> Traces:
    """Train as `train` does, and return the traces."""
    train(runner, name, words)
    return load_traces(runner.path(name))


def _list_exact(runner: CheckRunner) -> list[str]:
    """Return the arguments with which two runs have results that are equal bit by bit."""
    if runner.devices.kind == "cuda":
        return ["deterministic=true"]
    return []


def repeat(runner: CheckRunner) -> Outcome:
    first = trace(runner, "repeat/1", *_list_exact(runner))
    second = trace(runner, "repeat/2", *_list_exact(runner))
    todo = "test the memory and the card: a machine whose results vary cannot be trusted"
    return compare_bits(second, first, "an equal run", todo)


def verify(runner: CheckRunner) -> Outcome:
    whole = trace(runner, "repeat/1", *_list_exact(runner))
    verified = trace(runner, "verify", *_list_exact(runner), "verify.every=4")
    todo = "train without verify.every, and paste proof.md into an issue"
    return compare_bits(verified, whole, "the run without verify.every", todo)


def resume(runner: CheckRunner) -> Outcome:
    whole = trace(runner, "repeat/1", *_list_exact(runner))
    path = runner.path("resume")
    shutil.rmtree(path, ignore_errors=True)
    words = [*_list_exact(runner), f"save.every_steps={SAVED}"]
    code = 0
    try:
        train(runner, "resume", words, fault=f"kill@0:{KILLED}", resumes=True)
    except TrialFailed as error:
        code = error.code
    if code != 137:
        raise TrialFailed(
            f"it should have been killed by SIGKILL but ended with {code}: see resume.log", 1
        )
    train(runner, "resume", words, resumes=True)
    todo = "train without resume=auto, and paste proof.md into an issue"
    return compare_bits(load_traces(path), whole, "the run that was not killed", todo)


def list_modes(devices: Devices) -> Iterator[Mode]:
    """Yield each mode and schedule that these devices can run, except `single`, the reference."""
    count = devices.count
    for mode, traits in TRAITS.items():
        if traits.reference or traits.processes == "many":
            continue
        own = devices.in_one_process()
        if traits.many_devices:
            # The network `cnn_gn` has only seven blocks, so it is cut into at most four stages.
            limit = 4 if traits.staged else count
            own = devices.in_one_process(max(2, min(count, limit)))
        if traits.micro_batches:
            yield Mode(STREAMS, (f"mode={mode}", *own, "pipeline.microbatches=4"))
        else:
            yield Mode(mode, (f"mode={mode}", *own))
    workers = [*devices.in_one_process(), "nproc=2", "threads=1"]
    if count > 1:
        workers = devices.in_ranks(count)
        for mode, traits in TRAITS.items():
            if traits.processes == "many" and traits.same_maths:
                priority = int(traits.exchanges == "shards")
                yield Mode(mode, (f"mode={mode}", *workers), priority=priority)
        for schedule in get_args(Schedule):
            if schedule == STREAMS:
                continue
            words = (
                "mode=pipeline",
                # Each pair of devices is a pipeline of two stages, and the pipelines divide the
                # batch. If the number of devices is odd, the last device is not used.
                *devices.in_ranks(count // 2 * 2),
                "pipeline.stages=2",
                f"pipeline.schedule={schedule}",
                "pipeline.microbatches=4",
            )
            priority = 0 if schedule in ("1f1b", "gpipe") else 2
            yield Mode(schedule, words, priority=priority)
    for mode, traits in TRAITS.items():
        if not traits.same_maths:
            own = workers
            if traits.shared_memory:
                own = ["devices=auto", "nproc=2", "threads=1"]
            yield Mode(mode, (f"mode={mode}", *own), same=False)


def _check_mode(mode: Mode, runner: CheckRunner) -> Outcome:
    expected = trace(runner, "single")
    try:
        actual = trace(runner, f"modes/{mode.name}", *mode.words)
    except TrialFailed as error:
        # Exit code 2 (RecipeError) means, for these schedules, that this torch lacks the schedule.
        if mode.name in SPLIT_BACKWARD and error.code == 2:
            return Outcome("not here", str(error))
        raise
    if mode.same:
        return compare_traces(actual, expected, TOLERANCE[runner.devices.kind], ADVICE)
    first = sum(actual.losses[:5]) / 5
    last = sum(actual.losses[-5:]) / 5
    # A loss that is NaN must count as wrong: `not last < first` is true for NaN, whereas
    # `last >= first` is false.
    if not last < first or len(actual.losses) < STEPS:
        line = f"the loss does not fall: {first:.3f}, then {last:.3f}"
        return wrong(line, ADVICE, first=first, last=last)
    line = f"different maths from single; the loss falls from {first:.3f} to {last:.3f}"
    return right(line, first=first, last=last)


def _check_precision(name: str, runner: CheckRunner) -> Outcome:
    expected = trace(runner, "single")
    actual = trace(runner, f"precision/{name}", f"precision={name}")
    todo = f"train with precision=fp32 instead of {name}"
    return compare_traces(actual, expected, ROUNDED[name], todo)


def check_graphs(runner: CheckRunner) -> Outcome:
    eager = trace(runner, "graphs/launched", "graphs=false", *_list_exact(runner))
    words = [*_list_exact(runner), "graphs=true"]
    way = train(runner, "graphs/replayed", words)["graphs"]
    if way != "replayed":
        line = "no CUDA graph could be captured: the run's output says why"
        return wrong(line, "train with graphs=false", way=way)
    todo = "train with graphs=false, and paste proof.md into an issue"
    return compare_bits(load_traces(runner.path("graphs/replayed")), eager, "eager steps", todo)


def check_compile(runner: CheckRunner) -> Outcome:
    compilers = (os.environ.get("CXX") or "g++", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        return Outcome(
            "not here", "compile=true needs a C++ compiler, but none is here: install g++"
        )
    # Compilation for the CPU is slow, so a smaller network is used there.
    words = [] if runner.devices.kind == "cuda" else ["model.name=mlp"]
    expected = trace(runner, "compile/without", *words)
    actual = trace(runner, "compile/with", "compile=true", *words)
    tolerance = TOLERANCE[runner.devices.kind]
    return compare_traces(actual, expected, tolerance, "train with compile=false")


# --- Traces of a run, and their comparison


def load_traces(path: Path) -> Traces:
    """Load the traces of the run in the folder `path`."""
    from trainer.saving import checkpoint
    from trainer.telemetry.events import read_curves

    newest = checkpoint.load_newest(path, lambda line: None)
    if newest is None:
        raise TrialFailed("the run left no checkpoint", 1)

    norms = read_curves(path).get("train/grad_norm", ([], [], []))[2]
    losses = [float(row["train_loss"]) for row in read_steps_file(path)]
    state = newest.state
    return Traces(losses, norms, state.tensors("model"), state.tensors("optimizer"))


def compute_differences(actual: Traces, expected: Traces) -> dict[str, float]:
    """Return the largest relative difference of two runs in each field of `Traces`.

    A difference is infinite if one run lacks a step or a tensor that the other run has, if a value
    is not finite, or if fewer than `STEPS` steps were recorded.
    """
    return {
        "losses": _compare_numbers(actual.losses, expected.losses),
        "norms": _compare_numbers(actual.norms, expected.norms),
        "optimizer": _compare_tensors(actual.optimizer, expected.optimizer),
        "weights": _compare_tensors(actual.weights, expected.weights),
    }


def _compare_numbers(actual: Sequence[float], expected: Sequence[float]) -> float:
    if len(actual) != len(expected) or len(expected) < STEPS:
        return math.inf
    return compute_deviation(actual, expected)


def _compare_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest distance of a tensor from the expected tensor, relative to a norm.

    The norm is that of the expected tensor plus a thousandth of the norm of all expected tensors
    together, so that rounding errors of tensors with tiny values do not decide the result.
    """
    if not expected or actual.keys() != expected.keys():
        return math.inf
    if any(actual[name].shape != tensor.shape for name, tensor in expected.items()):
        return math.inf
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least = 1e-3 * math.hypot(*norms.values()) or 1e-12
    distances = []
    for name, tensor in expected.items():
        distance = float((actual[name].double() - tensor.double()).norm())
        distances.append(distance / (norms[name] + least))
    # max() ignores a NaN that is not the first value, so check for NaN before.
    if all(map(math.isfinite, distances)):
        return max(distances)
    return math.inf


def compare_traces(
    actual: Traces, expected: Traces, bounds: Mapping[str, float], todo: str
) -> Outcome:
    """Return a right outcome if two runs differ by at most `bounds`, otherwise a wrong one."""
    deviations = {}
    exceeded = []
    shown = []
    for name, value in compute_differences(actual, expected).items():
        # JSON has no infinity, so proof.json has null for an infinite difference.
        deviations[name] = value if math.isfinite(value) else None
        if not value <= bounds[name]:
            exceeded.append(f"{name} by {value:.2g} (at most {bounds[name]:g})")
        shown.append(f"{name} {value:.0e}" if value else f"{name} 0")
    figures = {"deviations": deviations, "bounds": bounds}
    if exceeded:
        return wrong(f"differs: {', '.join(exceeded)}", todo, **figures)
    if not any(deviations.values()):
        return right("the same to the last bit", **figures)
    return right(f"relative differences: {', '.join(shown)}", **figures)


def compare_bits(actual: Traces, expected: Traces, other: str, todo: str) -> Outcome:
    """Return a right outcome if two runs are equal to the last bit, otherwise a wrong one."""
    different = [name for name, value in compute_differences(actual, expected).items() if value]
    # Two runs that ended early must not pass, even if their results are equal.
    if len(expected.losses) != STEPS:
        different = ["steps"]
    if different:
        return wrong(f"{', '.join(different)} differ from {other}", todo, different=different)
    return right(
        "losses, norms, weights and optimizer state are the same to the last bit", different=[]
    )

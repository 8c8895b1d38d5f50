"""What limits the speed of a step, and what to try next: from measured parts to one sentence. Pure functions.

The parts follow the step's critical path: what computing hides costs nothing, so only what a step waits for is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes, wider_batch
from trainer.telemetry.symptoms import possible

NAMED = 0.2  # a part of the step that is not computing bounds it from this share on
WORTH = 1.2  # times as fast that the cache has to make reading to be named
CACHE = "data.cache=disk"
SHORT = "the run is too short: "
LITTLE = 0.05  # share of a step: what may be idle besides and is less changes no advice
UNEVEN = 1.15  # stages whose slowest takes so many times the mean are not balanced
Part = Literal["data", "compute", "launches", "communication", "bubble", "optimizer", "logging"]  # of a step
PARTS: tuple[Part, ...] = get_args(Part)
PHRASES: dict[Part, str] = {
    "data": "{share:.0%} of the step waits for images",
    "launches": "the GPU waits at least {share:.0%} of the step for Python to launch its kernels",
    "communication": "{share:.0%} of the step waits for communication between ranks",
    "bubble": "{share:.0%} of the devices' time in a whole step is idle, waiting for other stages",
    "optimizer": "{share:.0%} of the step is the optimizer",
    "logging": "{share:.0%} of the step is logging",
    "compute": "{share:.0%} of the step is computing, forward and backward",
}


@dataclass(frozen=True)
class StepParts:
    """What was measured of a step, in seconds, and of the stages there are."""

    step: float  # the mean step
    data: float = 0.0  # waiting for images
    optimizer: float = 0.0  # optimizer, moving average, clearing gradients, without its launches
    launches: float = 0.0  # in which GPUs wait for the host to launch kernels; no less than that
    launches_at_most: float = 0.0  # likewise, where it was not measured
    logging: float = 0.0  # meeting the other ranks and writing, spread over all steps
    communication: float | None = 0.0  # between ranks, beyond what computing hides; None where it was not measured
    at_most: bool = False  # `communication` is one all-reduce alone, of which computing may hide some
    # Share of the workers' time in a step, without waiting for images and optimizer, that they idle
    bubble: float = 0.0
    bubble_at_most: float = 0.0  # that share where GPUs waited for every launch within their stages; `bubble`, or more
    busy: Sequence[float] = ()  # seconds that each stage works in a step; empty without stages


@dataclass(frozen=True)
class Reading:
    """Seconds that one process takes for a photo."""

    read: float  # its file
    decode: float  # to pixels, no more of them than are needed
    transform: float  # cropping, resizing and augmenting
    cached: float  # all of it, from the cache

    @property
    def whole(self) -> float:
        return self.read + self.decode + self.transform


@dataclass(frozen=True)
class Setting:
    """What the run ran on."""

    processes: int = 1  # ranks in all
    cores: int = 1  # of this machine, for each of its ranks
    workers: int | None = None  # that read images for a rank; None where images lie in memory
    gpu: bool = False  # whether it computes on GPUs
    may_replay: bool = False  # graphs=true would be another run: steps are launched, and no recording has failed
    images: int | None = None  # of the training set; None where their number is not known
    reading: Reading | None = None  # of its photos, where the step waits for them


@dataclass(frozen=True)
class Verdict:
    """Where the time went, what bounds it, what to try: result.json's `verdict`, which calls `overrides` "try"."""

    bound: Part  # a key of `step`
    sentence: str  # for people, with what to try: a line for each advice, what matters most first
    overrides: list[str]  # `key=value` words to try, the most promising first
    step: dict[Part, float]  # share of each part of a step; they add up to 1
    run: dict[str, float]  # share of each part of the run; they add up to 1
    step_seconds: float  # of the mean step
    reading: Reading | None  # of photos, where the step waits for them
    unmeasured: str | None  # what the shares do not tell, in words
    probe_seconds: float  # what finding out took

    def to_dict(self) -> dict[str, Any]:
        """As result.json has it."""
        return {"try" if key == "overrides" else key: value for key, value in asdict(self).items()}


def shares(measured: StepParts) -> dict[Part, float]:
    """The parts of a step, adding up to 1; computing is what the others leave."""
    left = step = measured.step
    parts: dict[Part, float] = {}

    def take(name: Part, seconds: float) -> None:
        nonlocal left
        parts[name] = min(left, seconds) / step
        left -= min(left, seconds)

    take("data", measured.data)
    take("optimizer", measured.optimizer)
    take("logging", measured.logging)
    take("launches", measured.launches)
    take("bubble", measured.bubble * left)
    take("communication", 0.0 if measured.at_most else measured.communication or 0.0)
    return {name: left / step if name == "compute" else parts[name] for name in PARTS}


def judge(
    measured: StepParts, seconds: Mapping[str, float], recipe: Recipe, setting: Setting, probe_seconds: float = 0.0,
    warnings: Mapping[str, str] | None = None,
) -> Verdict:  # fmt: skip
    """What bounds the step; `seconds` are of the run's parts, "steps" among them.

    A line for each advice: `warnings` by their kinds, of learning before those of the machine, then the step, last what
    the run is too short for.
    """
    parts = shares(measured)
    largest = max((name for name in parts if name != "compute"), key=parts.__getitem__)
    bound = largest if parts[largest] >= NAMED else "compute"

    def fits(changed: Recipe) -> bool:
        """On as many processes, with as many images."""
        check_processes(changed, setting.processes)
        return setting.images is None or changed.batch_size <= max(setting.images, recipe.batch_size)

    overrides = possible(_advice(bound, measured, recipe, setting), recipe, fits)
    told = dict(warnings or {})
    of_machine = {kind for kind in told if kind == "cores" or kind.startswith("rank ")}
    lines = [told[kind] for kind in sorted(told, key=of_machine.__contains__)]
    sentence = PHRASES[bound].format(share=parts[bound])
    if _launching(measured) >= NAMED:
        sentence = sentence.replace("computing, ", "")
    if bound == "data" and setting.workers is None:
        sentence += ", which are prepared in the training process"
    reading = setting.reading if bound == "data" else None
    if reading is not None:
        times = {"reading files": reading.read, "decoding": reading.decode, "transforming": reading.transform}
        spent = ", ".join(f"{seconds / reading.whole:.0%} on {name}" for name, seconds in times.items())
        sentence += f": a reader spends {spent}"
    if bound == "bubble" and _uneven(measured.busy):
        slowest = max(range(len(measured.busy)), key=measured.busy.__getitem__)
        ratio = max(measured.busy) / (sum(measured.busy) / len(measured.busy))
        sentence += f": stage {slowest} works {ratio:.1f} times as long as the mean stage"
    idle, hidden = _unmeasured(measured)
    at_most = (measured.communication or 0.0) / measured.step if measured.at_most else 0.0
    most, sharded = 2 * at_most > parts["compute"], recipe.traits.exchanges == "shards"
    together = bound == "compute" and _launching(measured) < NAMED and (most or (sharded and at_most > LITTLE))
    if together:
        sentence = f"{parts[bound]:.0%} of the step is computing and communication between ranks"
        sentence += ", which overlap" if sharded else ": a longer run measures each"
        sentence += f": at most {at_most:.0%} is communication" * (not most)
    if any(word.startswith("batch_size=") for word in overrides) and setting.gpu and setting.processes > 1:
        sentence += f"; a GPU gets {recipe.batch_size / setting.processes:g} images of a batch"
    short: list[str] = []
    if bound in ("compute", "bubble", "optimizer"):
        sentence, short = "; ".join([sentence, *idle]), [] if together or sharded else hidden
    if overrides and not of_machine:  # where others have its cores, these shares are not the recipe's
        words = " or ".join(overrides)
        if setting.reading is not None and CACHE in overrides:  # as readers do, but no more than without any waiting
            gain = min(setting.reading.whole / setting.reading.cached, 1 / max(1 - parts["data"], 0.01))
            words = words.replace(CACHE, f"{CACHE} ({gain:.1f} times the images/s)")
        sentence += f"{'. T' if ': ' in sentence or '; ' in sentence else ': t'}ry {words}"
    total = sum(seconds.values())
    run = {name: spent / total for name, spent in seconds.items()}
    apart = max((name for name in run if name != "steps"), key=run.__getitem__, default="steps")
    rest = [f"steps are only {run['steps']:.0%} of this run: {apart} takes {run[apart]:.0%}"]
    rest *= run.get("steps", 1.0) < 0.5
    short, rest = (rest + short, []) if apart == "start-up" else (short, rest)
    lines += [sentence, *rest, *([SHORT + "; ".join(short)] if short else [])]
    unmeasured = "; ".join([*idle, *(SHORT * (not sharded) + note for note in hidden)]) or None
    return Verdict(bound, "\n".join(lines), overrides, parts, run, measured.step, reading, unmeasured, probe_seconds)


def _unmeasured(measured: StepParts) -> tuple[list[str], list[str]]:
    """What GPUs may have waited for launches, and what a longer run would tell of communication."""
    idle, hidden = _launching(measured), []
    if measured.communication is None:
        hidden = ["communication was not measured"]
    elif measured.at_most:
        share = min(shares(measured)["compute"], measured.communication / measured.step)
        hidden = [f"up to {share:.0%} of the step, counted as computing, may be communication that it does not hide"]
    more = "more " * (measured.bubble > 0)
    note = f"up to {idle:.0%} of the step {more}may be idle, GPUs waiting for Python to launch their kernels"
    return [note] * (idle > LITTLE), hidden


def _launching(measured: StepParts) -> float:
    """Share of a step that counts as computing or optimizer, and in which GPUs may have waited for launches."""
    parts = shares(measured)
    left = 1 - parts["data"] - parts["optimizer"] - parts["logging"]
    stages = min(parts["compute"], max(0.0, measured.bubble_at_most - measured.bubble) * left)
    return max(stages, min(parts["compute"] + parts["optimizer"], measured.launches_at_most / measured.step))


def _uneven(busy: Sequence[float]) -> bool:
    return len(busy) > 1 and max(busy) > UNEVEN * sum(busy) / len(busy)


def _advice(bound: Part, measured: StepParts, recipe: Recipe, setting: Setting) -> list[str]:
    """Words to try against a bound, the most promising first."""
    processes, workers, gpu = setting.processes, setting.workers, setting.gpu
    wider = wider_batch(recipe, processes, setting.images) if gpu else None
    larger = wider or f"batch_size={2 * recipe.batch_size}"
    if bound == "data":
        automatic = ["augment.auto=none"] if recipe.augment.auto != "none" else []
        if workers is None:
            return automatic or [larger]
        wanted = max(setting.cores, 2 * workers)
        reading, cached = setting.reading, recipe.data.cache != "off"
        cache = [CACHE] if reading and not cached and reading.whole > WORTH * reading.cached else []
        return cache + ([f"data.workers={wanted}"] if wanted <= 2 * setting.cores else []) + automatic
    if bound == "communication":
        if recipe.traits.exchanges == "weights":
            return [f"local_sgd.every={2 * (recipe.local_sgd.every or 1)}"]
        if recipe.traits.micro_batches:
            return [f"pipeline.stages={processes}", larger]
        compress = [] if recipe.ddp.compress else ["ddp.compress=bf16"]
        return [larger, *compress, "mode=local_sgd local_sgd.every=20"]
    by_hand = recipe.pipeline.microbatches != "auto" or recipe.pipeline.split_size is not None
    micro = ["pipeline.microbatches=auto"] if by_hand else []
    if bound == "bubble":
        if recipe.traits.one_stage_at_a_time:
            return ["mode=pipeline"]
        cuts = ["pipeline.cuts=auto"] if recipe.pipeline.cuts != "auto" else []
        words = cuts + micro if _uneven(measured.busy) else micro + cuts
        launches = max(measured.launches, measured.launches_at_most)
        waits = launches > shares(measured)["bubble"] * measured.step / 2  # for Python, most of it
        if gpu and processes == 1 and waits and setting.may_replay:
            return ["graphs=true", *(words or [larger])]
        return words or [larger, *(["mode=ddp"] if processes > 1 else [])]
    launching = bound == "launches" or _launching(measured) >= NAMED  # faster arithmetic would not be felt
    graphs = ["graphs=true"] if launching and setting.may_replay else []
    if bound == "optimizer":
        return [*graphs, larger, *(["ema=null"] if recipe.ema is not None else [])]
    if bound == "logging":
        return [f"logging.every_steps={10 * recipe.logging.every_steps}"]
    if launching:
        return micro + graphs + ([] if micro else [larger])
    faster = [] if recipe.channels_last else ["channels_last=true"]
    faster += ["precision=bf16"] if recipe.precision in ("fp32", "tf32") and gpu else []
    return ([wider] if wider else []) + faster + (["compile=true"] if gpu and not recipe.compile else [])

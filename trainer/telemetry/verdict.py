"""The verdict on a run: what limits the speed of a step, and which overrides to try.

All functions are pure. The parts of a step lie on its critical path. Work that overlaps with
computing costs no time, so only the time that a step waits for it is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes, suggest_wider_batch
from trainer.telemetry.symptoms import keep_possible

# Minimum share of a step for which a part other than computing is named as the bottleneck.
BOUND_SHARE = 0.2
# Minimum speedup of reading for which the cache is suggested.
MIN_CACHE_SPEEDUP = 1.2
CACHE = "data.cache=disk"
FEWER_THREADS = "threads=1"
TOO_SHORT = "the run is too short: "
# Waiting for kernel launches, or communication of shards, is not mentioned if it takes at most this
# share of a step.
NEGLIGIBLE_SHARE = 0.05
# Stages count as unbalanced if the slowest one takes more than this multiple of the stages' mean
# time.
UNEVEN_FACTOR = 1.15
Part = Literal["data", "compute", "launches", "communication", "bubble", "optimizer", "logging"]
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
    """Measurements of a step. Times are in seconds.

    Attributes:
        step: Mean duration of a step.
        data: Time in a step that a rank waits for images, the maximum over ranks.
        optimizer: Time of the optimizer, the weight average and clearing gradients, except the part
            of this time that `launches` contains.
        launches: Lower bound of the time that GPUs wait for the host to launch kernels; 0 if it was
            not measured.
        launches_at_most: Upper bound of the time that GPUs wait for the host to launch kernels; 0
            if `launches` was measured, and on CPUs.
        logging: Time of synchronizing the ranks and writing logs, averaged over all steps.
        communication: Time of communication between ranks that computing does not hide, or the
            upper bound that `at_most` describes; None if it was not measured.
        at_most: Whether `communication` is the time of one isolated all-reduce, which computing may
            partly hide.
        bubble: Fraction of the time of a pipeline's workers that is idle, in a step without waiting
            for images and without the optimizer; 0 without stages.
        bubble_at_most: Upper bound of `bubble`: its value if GPUs waited for every launch within
            their stages. It is equal to `bubble` if `launches` was measured.
        busy: Working time of each stage in a step; empty without stages.
    """

    step: float
    data: float = 0.0
    optimizer: float = 0.0
    launches: float = 0.0
    launches_at_most: float = 0.0
    logging: float = 0.0
    communication: float | None = 0.0
    at_most: bool = False
    bubble: float = 0.0
    bubble_at_most: float = 0.0
    busy: Sequence[float] = ()


@dataclass(frozen=True)
class Reading:
    """Seconds that one process needs to prepare a photo.

    Attributes:
        read: Reading the file.
        decode: Decoding to as few pixels as the model needs.
        transform: Cropping, resizing and augmenting.
        cached: Total time for a photo that is in the cache.
    """

    read: float
    decode: float
    transform: float
    cached: float

    @property
    def whole(self) -> float:
        return self.read + self.decode + self.transform


@dataclass(frozen=True)
class Setting:
    """Hardware and data of a run.

    Attributes:
        processes: Number of ranks.
        cores: Number of CPU cores of this machine per rank.
        workers: Number of processes that read images for a rank; None if the images are in memory.
        gpu: Whether the run computes on GPUs.
        may_replay: Whether `graphs=true` would change the run: its steps are eager so far, and no
            capture has failed.
        images: Size of the training set; None if unknown.
        reading: Reading times of the photos, measured only if the step waits for them.
    """

    processes: int = 1
    cores: int = 1
    workers: int | None = None
    gpu: bool = False
    may_replay: bool = False
    images: int | None = None
    reading: Reading | None = None


@dataclass(frozen=True)
class Verdict:
    """Where the time went, what limits the speed and what to try: `verdict` in result.json.

    Attributes:
        bound: Part of the step that limits the speed.
        sentence: Text for the user, with one line for each topic.
        overrides: `key=value` arguments to try, the most promising one first.
        step: Share of each part of a step; the shares add up to 1.
        run: Share of each part of the run; the shares add up to 1.
        step_seconds: Mean duration of a step.
        reading: Reading times of photos if the step waits for them.
        unmeasured: Text about times that could not be measured; None if there are none.
        probe_seconds: Seconds that the measurements took.
    """

    bound: Part
    sentence: str
    overrides: list[str]
    step: dict[Part, float]
    run: dict[str, float]
    step_seconds: float
    reading: Reading | None
    unmeasured: str | None
    probe_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `verdict` in result.json, where `overrides` is called "try"."""
        names = {"overrides": "try"}
        return {names.get(key, key): value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class _Findings:
    """Arguments of the functions that write the text of a verdict.

    Attributes:
        measured: Measurements of a step.
        recipe: Recipe of the run.
        setting: Hardware and data of the run.
        warnings: Warnings about the run by kind.
        step: Share of each part of a step.
        run: Share of each part of the run.
        bound: Part of the step that limits the speed.
        overrides: `key=value` arguments to try, the most promising one first.
    """

    measured: StepParts
    recipe: Recipe
    setting: Setting
    warnings: Mapping[str, str]
    step: dict[Part, float]
    run: dict[str, float]
    bound: Part
    overrides: list[str]

    @property
    def communication_at_most(self) -> float:
        """Share of the step that an isolated all-reduce takes; 0 if communication was measured."""
        if not self.measured.at_most:
            return 0.0
        return (self.measured.communication or 0.0) / self.measured.step

    @property
    def is_sharded(self) -> bool:
        """Whether ranks exchange shards of the weights.

        This exchange overlaps with computing, so a longer run cannot measure the two separately.
        """
        return self.recipe.traits.exchanges == "shards"

    @property
    def has_mixed_computing(self) -> bool:
        """Whether computing and communication can only be reported as a sum."""
        if self.bound != "compute" or _compute_launch_wait(self.measured) >= BOUND_SHARE:
            return False
        is_mostly_open = 2 * self.communication_at_most > self.step["compute"]
        return is_mostly_open or (self.is_sharded and self.communication_at_most > NEGLIGIBLE_SHARE)


def compute_shares(measured: StepParts) -> dict[Part, float]:
    """Return the share of each part of a step. The time not accounted for counts as computing."""
    remaining = measured.step
    parts = {}

    def take(name: Part, seconds: float) -> None:
        nonlocal remaining
        spent = min(remaining, seconds)
        parts[name] = spent / measured.step
        remaining -= spent

    take("data", measured.data)
    take("optimizer", measured.optimizer)
    take("logging", measured.logging)
    take("launches", measured.launches)
    take("bubble", measured.bubble * remaining)
    communication = measured.communication or 0.0
    if measured.at_most:
        communication = 0.0
    take("communication", communication)
    parts["compute"] = remaining / measured.step
    return {name: parts[name] for name in PARTS}


def judge(
    measured: StepParts,
    seconds: Mapping[str, float],
    recipe: Recipe,
    setting: Setting,
    probe_seconds: float = 0.0,
    warnings: Mapping[str, str] = {},
) -> Verdict:
    """Determine what limits the speed of a step, and which overrides to try.

    Args:
        measured: Measurements of a step.
        seconds: Duration of each part of the run, including "steps".
        recipe: Recipe of the run.
        setting: Hardware and data of the run.
        probe_seconds: Seconds that the measurements took.
        warnings: Warnings about the run by kind, which the text should include.
    """
    step = compute_shares(measured)
    total = sum(seconds.values())
    run = {name: spent / total for name, spent in seconds.items()}
    bound: Part = max((name for name in step if name != "compute"), key=step.__getitem__)
    if step[bound] < BOUND_SHARE:
        bound = "compute"

    def fits(changed: Recipe) -> bool:
        """Return whether a recipe can run on the same processes and fill its batches."""
        check_processes(changed, setting.processes)
        if setting.images is None:
            return True
        return changed.batch_size <= max(setting.images, recipe.batch_size)

    overrides = keep_possible(_list_remedies(bound, measured, recipe, setting), recipe, fits)
    if FEWER_THREADS in warnings.get("cores", ""):
        overrides = [FEWER_THREADS, *overrides]
    findings = _Findings(measured, recipe, setting, warnings, step, run, bound, overrides)
    reading = None
    if bound == "data":
        reading = setting.reading
    return Verdict(
        bound,
        _render_text(findings),
        overrides,
        step,
        run,
        measured.step,
        reading,
        _render_unmeasured(findings),
        probe_seconds,
    )


def _render_text(findings: _Findings) -> str:
    """Return the text of the verdict, one line for each topic.

    The order is: warnings about learning, warnings about the machine, the step, the whole run, and
    what a longer run would measure.
    """
    warnings = findings.warnings
    machine_kinds = {kind for kind in warnings if kind == "cores" or kind.startswith("rank ")}
    lines = [warnings[kind] for kind in sorted(warnings, key=machine_kinds.__contains__)]
    sentence = _describe_step(findings)
    too_short = []
    if findings.bound in ("compute", "bubble", "optimizer"):
        sentence = "; ".join([sentence, *_describe_launches(findings.measured)])
        if not findings.has_mixed_computing and not findings.is_sharded:
            too_short = _describe_communication(findings.measured)
    # The text suggests no overrides if other processes use the cores or a rank is slow: the shares
    # of the step then depend on the machine, and not on the recipe alone.
    if findings.overrides and not machine_kinds:
        start = ". T" if ": " in sentence or "; " in sentence else ": t"
        sentence += f"{start}ry {_describe_overrides(findings)}"
    lines.append(sentence)
    run = findings.run
    if run["steps"] < 0.5:
        others = [name for name in run if name != "steps"]
        longest = max(others, key=run.__getitem__)
        note = f"steps are only {run['steps']:.0%} of this run: {longest} takes {run[longest]:.0%}"
        if longest == "start-up":
            too_short.insert(0, note)
        else:
            lines.append(note)
    if too_short:
        lines.append(TOO_SHORT + "; ".join(too_short))
    return "\n".join(lines)


def _describe_step(findings: _Findings) -> str:
    """Describe what limits the speed of the step, with details that explain it."""
    bound = findings.bound
    measured = findings.measured
    setting = findings.setting
    sentence = PHRASES[bound].format(share=findings.step[bound])
    if _compute_launch_wait(measured) >= BOUND_SHARE:
        sentence = sentence.replace("computing, ", "")
    if bound == "data":
        if setting.workers is None:
            sentence += ", which are prepared in the training process"
        reading = setting.reading
        if reading:
            whole = reading.whole
            sentence += (
                f": a reader spends {reading.read / whole:.0%} on reading files, "
                f"{reading.decode / whole:.0%} on decoding, "
                f"{reading.transform / whole:.0%} on transforming"
            )
    if bound == "bubble" and _is_uneven(measured.busy):
        longest = max(measured.busy)
        slowest = measured.busy.index(longest)
        ratio = longest / (sum(measured.busy) / len(measured.busy))
        sentence += f": stage {slowest} works {ratio:.1f} times as long as the mean stage"
    if findings.has_mixed_computing:
        at_most = findings.communication_at_most
        sentence = f"{findings.step[bound]:.0%} of the step is computing and communication "
        sentence += "between ranks"
        if findings.is_sharded:
            sentence += ", which overlap"
        else:
            sentence += ": a longer run measures each"
        if 2 * at_most <= findings.step["compute"]:
            sentence += f": at most {at_most:.0%} is communication"
    changes_batch = any(override.startswith("batch_size=") for override in findings.overrides)
    if changes_batch and setting.gpu and setting.processes > 1:
        batch_size = findings.recipe.batch_size
        sentence += f"; a GPU gets {batch_size / setting.processes:g} images of a batch"
    return sentence


def _describe_overrides(findings: _Findings) -> str:
    text = " or ".join(findings.overrides)
    reading = findings.setting.reading
    if reading is None or CACHE not in findings.overrides:
        return text
    # The step waits for images, so its speed grows by the same factor as the speed of reading, but
    # only until the step no longer waits for images.
    without_waiting = 1 / max(1 - findings.step["data"], 0.01)
    speedup = min(reading.whole / reading.cached, without_waiting)
    return text.replace(CACHE, f"{CACHE} ({speedup:.1f} times the images/s)")


def _render_unmeasured(findings: _Findings) -> str | None:
    notes = _describe_launches(findings.measured)
    for note in _describe_communication(findings.measured):
        if not findings.is_sharded:
            note = TOO_SHORT + note
        notes.append(note)
    return "; ".join(notes) or None


def _describe_launches(measured: StepParts) -> list[str]:
    """Return a note on the time that GPUs may have waited for launches, unless it is negligible."""
    idle = _compute_launch_wait(measured)
    if idle <= NEGLIGIBLE_SHARE:
        return []
    more = "more " if measured.bubble > 0 else ""
    return [
        f"up to {idle:.0%} of the step {more}may be idle, "
        "GPUs waiting for Python to launch their kernels"
    ]


def _describe_communication(measured: StepParts) -> list[str]:
    """Return a note on communication that only a longer run would measure, if any."""
    if measured.communication is None:
        return ["communication was not measured"]
    if not measured.at_most:
        return []
    share = min(compute_shares(measured)["compute"], measured.communication / measured.step)
    return [
        f"up to {share:.0%} of the step, counted as computing, may be communication that it "
        "does not hide"
    ]


def _compute_launch_wait(measured: StepParts) -> float:
    """Return an upper bound of the share of a step in which GPUs may have waited for launches.

    The shares of the step count this time as computing or as the optimizer.
    """
    parts = compute_shares(measured)
    in_stages = 1 - parts["data"] - parts["optimizer"] - parts["logging"]
    hidden_bubble = max(0.0, measured.bubble_at_most - measured.bubble) * in_stages
    launches = measured.launches_at_most / measured.step
    return max(
        min(parts["compute"], hidden_bubble),
        min(parts["compute"] + parts["optimizer"], launches),
    )


def _is_uneven(busy: Sequence[float]) -> bool:
    return len(busy) > 1 and max(busy) > UNEVEN_FACTOR * sum(busy) / len(busy)


def _list_remedies(
    bound: Part,
    measured: StepParts,
    recipe: Recipe,
    setting: Setting,
) -> list[str]:
    """List overrides that may help, the most promising first. The recipe may refuse some."""
    processes = setting.processes
    workers = setting.workers
    wider = None
    if setting.gpu:
        wider = suggest_wider_batch(recipe, processes, setting.images)
    larger = wider or f"batch_size={2 * recipe.batch_size}"
    remedies = []
    if bound == "data":
        reading = setting.reading
        if workers is not None:
            is_uncached = recipe.data.cache == "off"
            if reading and is_uncached and reading.whole > MIN_CACHE_SPEEDUP * reading.cached:
                remedies.append(CACHE)
            more_workers = max(setting.cores, 2 * workers)
            if more_workers <= 2 * setting.cores:
                remedies.append(f"data.workers={more_workers}")
        if recipe.augment.auto != "none":
            remedies.append("augment.auto=none")
        elif recipe.augment.transforms:
            remedies.append("augment.transforms=[]")
        elif workers is None:
            remedies.append(larger)
        return remedies
    if bound == "communication":
        if recipe.traits.exchanges == "weights":
            return [f"local_sgd.every={2 * (recipe.local_sgd.every or 1)}"]
        if recipe.traits.micro_batches:
            return [f"pipeline.stages={processes}", larger]
        remedies.append(larger)
        if recipe.traits.exchanges == "gradients" and not recipe.ddp.compress:
            remedies.append("ddp.compress=bf16")
        return [*remedies, "mode=local_sgd local_sgd.every=20"]
    micro = []
    if recipe.pipeline.microbatches != "auto" or recipe.pipeline.split_size is not None:
        micro = ["pipeline.microbatches=auto"]
    if bound == "bubble":
        if recipe.traits.one_stage_at_a_time:
            return ["mode=pipeline"]
        cuts = []
        if recipe.pipeline.cuts != "auto":
            cuts = ["pipeline.cuts=auto"]
        schedule = cuts + micro if _is_uneven(measured.busy) else micro + cuts
        launches = max(measured.launches, measured.launches_at_most)
        waits_for_python = launches > compute_shares(measured)["bubble"] * measured.step / 2
        if setting.gpu and processes == 1 and waits_for_python and setting.may_replay:
            return ["graphs=true", *(schedule or [larger])]
        if schedule:
            return schedule
        if processes > 1:
            return [larger, "mode=ddp"]
        return [larger]
    if bound == "logging":
        return [f"logging.every_steps={10 * recipe.logging.every_steps}"]
    # While GPUs wait for launches, faster arithmetic does not make the step faster, so only
    # suggest overrides that reduce the number of launches or their share of the step.
    is_launching = bound == "launches" or _compute_launch_wait(measured) >= BOUND_SHARE
    graphs = []
    if is_launching and setting.may_replay:
        graphs = ["graphs=true"]
    if bound == "optimizer":
        remedies += [*graphs, larger]
        if recipe.ema is not None:
            remedies.append("ema=null")
        return remedies
    if is_launching:
        return micro + graphs if micro else [*graphs, larger]
    if wider:
        remedies.append(wider)
    if not recipe.channels_last:
        remedies.append("channels_last=true")
    if setting.gpu and recipe.precision in ("fp32", "tf32"):
        remedies.append("precision=bf16")
    if setting.gpu and not recipe.compile:
        remedies.append("compile=true")
    return remedies

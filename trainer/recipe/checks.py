"""What can run: modes with processes, counts of devices and options. No torch here.

Everything in this room answers before anything heavy starts, with the command that works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec

from trainer.errors import RecipeError, SetupError
from trainer.recipe import IN_TURN, MEASURED, STREAMS, Recipe, flatten, neighbours
from trainer.recipe.recipe_files import word_of
from trainer.recipe.shares import check_shares, given, rows_of
from trainer.recipe.versions import SINCE, installed, torch_has

V_SHAPED = ("zbv", "dualpipev")  # rank r holds stages r and 2P - 1 - r
# Stages on each rank, where the schedule has several.
VIRTUAL = dict.fromkeys(("interleaved1f1b", "loopedbfs", "interleavedzerobubble", *V_SHAPED, MEASURED), 2)
SPLIT_BACKWARD = ("interleavedzerobubble", "zbv", "dualpipev")  # inputs' and weights' gradients apart
TWO_PARTS = "backward passes in two parts"  # the row of these schedules in the table of versions
FEW_IMAGES, ENOUGH_IMAGES = 64, 128  # in a step of one GPU: launching kernels then takes longer than running them

OPTIONS = {
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "tf32": ("precision", "tf32"),
    "compile": ("compile", True),
    "channels_last": ("channels_last", True),
    "ema": ("ema", 0.9),
    "mixup": ("augment.mixup", 0.2),
    "clip_grad_norm": ("clip_grad_norm", 1.0),
    "accumulate": ("accumulate", 2),
    "accumulate=auto": ("accumulate", "auto"),
    "sync_bn": ("sync_bn", True),
    "label_smoothing": ("loss.label_smoothing", 0.1),
    "freeze": ("model.freeze", 1),
    "layer_decay": ("optimizer.layer_decay", 0.75),
    "muon": ("optimizer.name", "muon"),
    "compress": ("ddp.compress", "bf16"),
    "graphs": ("graphs", True),
    "recompute": ("recompute", True),
    "shares": ("shares", "auto"),
}  # each with a key and a value that turn it on


def schedule_of(recipe: Recipe, processes: int) -> str:
    """The stages' schedule: in turn, or a pipeline's: the recipe's, else streams in one process and 1F1B in several."""
    if recipe.traits.one_stage_at_a_time:
        return IN_TURN
    return recipe.pipeline.schedule or (STREAMS if processes == 1 else "1f1b")


def ranks_per_pipeline(recipe: Recipe, processes: int) -> int:
    """How many of the processes hold one copy of the model between them."""
    return (recipe.pipeline.stages or processes) if recipe.traits.staged and processes > 1 else 1


def data_shares(recipe: Recipe, processes: int) -> int:
    """Into how many parts the global batch, or the data, is divided."""
    return max(1, processes // ranks_per_pipeline(recipe, processes))


def divides(recipe: Recipe, count: int, accumulate: int | None = None) -> bool:
    """Whether the global batch can be divided into `count` shares, and each into `accumulate` micro-batches."""
    unit = (accumulate or recipe.pieces) * recipe.augment.together
    equal = unit if recipe.traits.uneven or given(recipe) else count * unit
    return recipe.batch_size >= count * unit and recipe.batch_size % equal == 0


def most_rows(recipe: Recipe, count: int, accumulate: int | None = None) -> int:
    """Images of the largest micro-batch then."""
    return max(rows_of(recipe, count, accumulate))


def piece_counts(recipe: Recipe, count: int) -> list[int]:
    """All numbers that `accumulate` can have where the global batch is divided into `count` shares."""
    return [n for n in range(1, recipe.batch_size // count + 1) if divides(recipe, count, n)]


def weight_shards(recipe: Recipe, processes: int) -> int:
    """Into how many parts each weight is divided."""
    return (recipe.fsdp.shards or processes) if recipe.traits.exchanges == "shards" else 1


def virtual_stages(recipe: Recipe, schedule: str) -> int:
    """Stages on each rank."""
    return recipe.pipeline.virtual_stages or VIRTUAL.get(schedule, 1)


def check_processes(recipe: Recipe, processes: int, nodes: int = 1) -> None:
    """Hold the recipe against the number of processes it is started with.

    Raises:
        RecipeError: when the mode cannot run in that many or with these options, or the batch does not divide.
    """
    check_options(recipe)
    if processes > 1:
        _refuse(recipe, recipe.traits.refuses_processes)
    if recipe.traits.processes == "one" and processes > 1:
        raise RecipeError(
            f"mode={recipe.mode} runs in 1 process, not {processes}: "
            f"type python -m trainer ... mode={recipe.mode} without torchrun and nproc=, or mode=ddp"
        )
    if recipe.traits.shared_memory and nodes > 1:
        raise RecipeError(
            f"mode={recipe.mode} shares one machine's memory and cannot span {nodes} nodes: use mode=local_sgd"
        )
    if recipe.traits.micro_batches:
        _check_pipeline(recipe, processes)
    parts = weight_shards(recipe, processes)
    if processes % parts:
        raise RecipeError(
            f"fsdp.shards={parts} runs in a multiple of {parts} processes, not {processes}: type nproc={parts}, or "
            "fsdp.shards=null"
        )
    if recipe.traits.exchanges == "shards" and recipe.fsdp.offload and processes == 1:
        raise RecipeError(
            "fsdp.offload=true moves shards, but one process has none: type nproc=2, or fsdp.offload=false"
        )
    if recipe.graphs is True and (reason := launched_because(recipe, processes)) is not None:
        raise RecipeError(f"graphs=true is not possible here: {reason}")
    count = data_shares(recipe, processes)
    if not divides(recipe, count):
        among = [f"{count} {'processes' if count == processes else 'replicas'}"] if count > 1 else []
        among += [f"accumulate={recipe.pieces}"] if recipe.pieces > 1 else []
        among += ["pairs of images (mixup, cutmix)"] if recipe.augment.together > 1 else []
        raise RecipeError(
            f"batch_size={recipe.batch_size} does not divide among {' x '.join(among)}; "
            f"try batch_size={_batch_sizes(recipe, processes)}"
        )
    check_shares(recipe, processes)
    if recipe.traits.micro_batches:
        microbatch_counts(recipe, processes)


def check_options(recipe: Recipe) -> None:
    """Refuse an option that the mode cannot have."""
    if recipe.devices != "auto" and len({device.partition(":")[0] for device in recipe.devices}) > 1:
        raise RecipeError(f"devices={','.join(recipe.devices)} mixes cpu and cuda; training uses one kind")
    _refuse(recipe, recipe.traits.refuses)
    if recipe.traits.staged and recipe.recompute == "auto":
        raise RecipeError(
            f"recompute=auto is not for mode={recipe.mode}, whose cuts are measured with it or without: use "
            "recompute=true, or recompute=false"
        )
    if recipe.distill.teacher is None and (recipe.distill.weight, recipe.distill.temperature) != (None, None):
        nulls = "distill.weight=null distill.temperature=null"
        raise RecipeError(f"the keys of distill do nothing without a teacher: type distill.teacher=RUN, or {nulls}")
    if recipe.traits.exchanges == "shards" and recipe.fsdp.offload and recipe.precision == "fp16":
        raise RecipeError(
            "precision=fp16 is not for fsdp.offload=true: torch's optimizers would read the scale of the loss on the "
            "host before it has arrived there; use precision=bf16"
        )
    schedule = recipe.pipeline.schedule
    if recipe.traits.micro_batches and schedule in refused_schedules():
        (major, minor), instead = SINCE[TWO_PARTS]
        raise RecipeError(
            f"pipeline.schedule={schedule} needs torch {major}.{minor} or newer: torch {installed('torch')} crashes in "
            f"its backward pass; {instead}"
        )
    if recipe.traits.micro_batches and recipe.compile and schedule in SPLIT_BACKWARD:
        raise RecipeError(
            f"compile=true is not for pipeline.schedule={schedule}, which computes the gradients of inputs and weights "
            "apart, and a compiled backward pass is one piece: use pipeline.schedule=1f1b or interleaved1f1b"
        )


def launched_because(recipe: Recipe, processes: int) -> str | None:
    """Why a step's kernels are launched one by one, and not recorded, whatever the device; None where they may be."""
    if recipe.graphs is False:
        return "graphs=false says so"
    refuses = recipe.traits.refuses | (recipe.traits.refuses_processes if processes > 1 else {})
    if "graphs" in refuses:
        return refuses["graphs"]
    if processes > 1 and recipe.sync_bn:
        return "ranks exchange statistics within a pass; use sync_bn=false, or graphs=false"
    if processes > 1 and recipe.graphs == "auto" and recipe.traits.exchanges == "gradients":
        return "gradients are exchanged while the backward pass still runs; graphs=true exchanges them after it"
    return None


def _refuse(recipe: Recipe, refuses: Mapping[str, str]) -> None:
    values = flatten(recipe.to_dict())
    for option, reason in refuses.items():
        key, value = OPTIONS[option]
        if values[key] == value or isinstance(values[key], list):  # shares by numbers are shares
            raise RecipeError(f"{word_of(key, values[key])} is not for mode={recipe.mode}: {reason}")


def refused_schedules() -> tuple[str, ...]:
    """Those that the installed torch cannot run."""
    return () if torch_has(TWO_PARTS) else SPLIT_BACKWARD


def _check_pipeline(recipe: Recipe, processes: int) -> None:
    schedule, wanted, virtual = schedule_of(recipe, processes), recipe.pipeline.stages, recipe.pipeline.virtual_stages
    fixed = 2 if schedule in V_SHAPED else 1 if schedule not in VIRTUAL else virtual
    if virtual not in (None, fixed):
        others = "" if schedule in V_SHAPED else ", or use pipeline.schedule=interleaved1f1b or loopedbfs"
        raise RecipeError(
            f"pipeline.schedule={schedule} takes {fixed} as pipeline.virtual_stages, not {virtual}: leave "
            f"pipeline.virtual_stages out{others}"
        )
    if schedule == STREAMS:
        if processes > 1:
            raise RecipeError(
                f"pipeline.schedule=streams runs in 1 process, not {processes}: type python -m trainer ... without "
                "torchrun and nproc=, or pipeline.schedule=1f1b"
            )
        return
    if processes == 1:
        need = wanted or 2
        alone = "" if (virtual or 1) > 1 else "; one process: pipeline.schedule=streams"
        raise RecipeError(
            f"pipeline.schedule={schedule} runs in {need} processes or more, one a stage: type "
            f"torchrun --nproc_per_node={need} -m trainer ... or nproc={need}{alone}"
        )
    if wanted is not None and processes % wanted:
        near = neighbours(processes, wanted)
        raise RecipeError(
            f"pipeline.stages={wanted} runs in a multiple of {wanted} processes, not {processes}: "
            f"type torchrun --nproc_per_node={near.split()[0]} -m trainer ... (or nproc=), {near} would do"
        )


def microbatch_counts(recipe: Recipe, processes: int) -> list[int]:
    """The numbers of micro-batches that a pipeline may use: one where the recipe says, else all that can run.

    Over processes all micro-batches are equal, because stages exchange tensors of one shape.

    Raises:
        RecipeError: the recipe's number cannot be, with those that can.
    """
    schedule, section = schedule_of(recipe, processes), recipe.pipeline
    rows = recipe.batch_size // (data_shares(recipe, processes) * recipe.pieces)
    if schedule == STREAMS:
        if section.split_size is not None:
            return [-(-rows // min(section.split_size, rows))]
        if section.microbatches == "auto":
            doubled = {count << n for count in (1, 3) for n in range(7)}  # 1, 2, 3, 4, 6, 8, 12, 16, ...
            return sorted(count for count in doubled if count <= min(rows, 64))
        if int(section.microbatches) > rows:
            raise RecipeError(f"pipeline.microbatches={section.microbatches} of {rows} images: at most {rows} can be")
        return [int(section.microbatches)]
    possible = [m for m in range(1, rows + 1) if rows % m == 0 and not _why_not(schedule, m, recipe, processes)]
    what = f"{rows} images a step" + (" and replica" if data_shares(recipe, processes) > 1 else "")
    what += f" (batch_size={recipe.batch_size}, accumulate={recipe.pieces})" if recipe.pieces > 1 else ""
    if not possible:
        raise RecipeError(
            f"{what} do not divide into equal micro-batches for pipeline.schedule={schedule}, which wants "
            f"{_round(recipe, processes)} or more of them: try batch_size={_batch_sizes(recipe, processes)}"
        )
    if section.split_size is None and section.microbatches == "auto":
        return possible
    if section.split_size is not None:
        wanted, key = rows / section.split_size, "pipeline.split_size"
        shown, choices = str(section.split_size), [rows // m for m in reversed(possible)]
    else:
        wanted, key = float(section.microbatches), "pipeline.microbatches"
        shown, choices = str(section.microbatches), possible
    if wanted in possible:
        return [int(wanted)]
    reason = _why_not(schedule, int(wanted), recipe, processes) if wanted == int(wanted) and not rows % wanted else None
    reason = reason or f"{what} do not divide into equal micro-batches like that"
    raise RecipeError(f"{key}={shown}: {reason}; try {key}={_listed(choices)}")


def _why_not(schedule: str, microbatches: int, recipe: Recipe, processes: int) -> str | None:
    """torch's own conditions on the number of micro-batches."""
    ranks = ranks_per_pipeline(recipe, processes)
    stages = ranks * virtual_stages(recipe, schedule)
    if schedule in ("1f1b", "dualpipev") and microbatches < stages:
        return f"pipeline.schedule={schedule} wants at least as many micro-batches as stages ({stages})"
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved1f1b", "interleavedzerobubble") and microbatches % rounds:
        return f"pipeline.schedule={schedule} wants a multiple of its {rounds} rounds"
    return None


def wider_batch(recipe: Recipe, cards: int, images: int | None = None) -> str | None:
    """Words for a batch that gives each GPU enough to do, where it gets few images; None elsewhere.

    SGD's learning rate grows with it, after a warm-up (Goyal et al., arXiv:1706.02677); `images` of the training set
    are the most.
    """
    each = recipe.batch_size / cards
    replicated = recipe.traits.exchanges in ("gradients", "shards", "copies", "weights")
    if cards < 2 or each >= FEW_IMAGES or not replicated:
        return None
    factor = 2 ** math.ceil(math.log2(ENOUGH_IMAGES / each))
    if images is not None and factor * recipe.batch_size > images:
        return None
    by_hand = recipe.optimizer.name == "sgd" and recipe.optimizer.lr_per is None
    lr = f" optimizer.lr={factor * recipe.optimizer.lr:g}" if by_hand else ""
    warmup = min(5, recipe.epochs // 10)
    lr += f" schedule.warmup_epochs={warmup}" if lr and warmup > recipe.schedule.warmup_epochs == 0 else ""
    return f"batch_size={factor * recipe.batch_size}{lr}"


def _round(recipe: Recipe, processes: int) -> int:
    """Micro-batches of which every multiple can run."""
    schedule, ranks = schedule_of(recipe, processes), ranks_per_pipeline(recipe, processes)
    if schedule in ("1f1b", "dualpipev"):
        return ranks * virtual_stages(recipe, schedule)
    return ranks if schedule in ("interleaved1f1b", "interleavedzerobubble") else 1


def _batch_sizes(recipe: Recipe, processes: int) -> str:
    """Batch sizes around the recipe's that divide among everything, in words."""
    rows = recipe.augment.together
    if recipe.traits.micro_batches:
        schedule, section = schedule_of(recipe, processes), recipe.pipeline
        count = _round(recipe, processes)
        if section.microbatches != "auto" and not _why_not(schedule, int(section.microbatches), recipe, processes):
            count = int(section.microbatches)
        images = section.split_size if section.split_size is not None and schedule != STREAMS else 1
        rows = math.lcm(rows, count * images)
    return neighbours(recipe.batch_size, data_shares(recipe, processes) * recipe.pieces * rows)


def _listed(choices: list[int]) -> str:
    shown = choices if len(choices) <= 8 else [*choices[:4], *choices[-3:]]
    return " or ".join([", ".join(map(str, shown[:-1])), str(shown[-1])]) if len(shown) > 1 else str(shown[0])


def check_loggers(recipe: Recipe) -> None:
    """Raises SetupError where a logger that the recipe names is not installed."""
    for name in ("wandb", "mlflow"):
        spec = find_spec(name) if getattr(recipe.logging, name) else None
        if getattr(recipe.logging, name) and (spec is None or spec.origin is None):  # a mere folder of that name
            raise SetupError(f"logging.{name} needs the library: pip install {name}, or logging.{name}=null")

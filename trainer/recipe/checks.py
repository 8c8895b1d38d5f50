"""Checks of a recipe against the mode, the number of processes and the options, without torch.

The checks run before anything heavy is imported. Their messages name a command that works.
"""

import math
import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec

from trainer.errors import RecipeError, SetupError
from trainer.recipe import IN_TURN, MEASURED, STREAMS, Recipe, compare_recipes, flatten
from trainer.recipe.known_names import DATASETS, TASKS, TIMM, check_model_name
from trainer.recipe.metric_table import check_metrics
from trainer.recipe.mode_table import WHOLE_MATRICES
from trainer.recipe.optimizer_table import OPTIMIZERS, REFUSED, OptimizerTraits
from trainer.recipe.recipe_files import format_argument
from trainer.recipe.schedule_table import LR_SCHEDULES
from trainer.recipe.shares import check_shares, count_rows, fixed_shares
from trainer.recipe.text import find_nearest, format_neighbors, list_some
from trainer.recipe.transform_names import check_transform_names
from trainer.recipe.unused import find_idle
from trainer.versions import SINCE, read_version, torch_has

# Schedules in which rank r has the stages r and 2P - 1 - r. P is the number of ranks in a pipeline.
V_SHAPED = ("zbv", "dualpipev")
# Default number of stages on each rank, for schedules with more than one.
VIRTUAL = dict.fromkeys(
    ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", *V_SHAPED, MEASURED), 2
)
# Schedules that compute the gradients of inputs and of weights separately.
SPLIT_BACKWARD = ("interleavedzerobubble", "zbv", "dualpipev")
# Name of the row for the schedules in `SPLIT_BACKWARD` in the table `trainer.versions.SINCE`.
TWO_PARTS = "backward passes in two parts"
# Number of images per step and GPU below which a larger batch is suggested. With few images,
# launching the kernels of a step usually takes longer than running them.
FEW_IMAGES = 64
# Number of images per step and GPU in a suggested batch.
ENOUGH_IMAGES = 128

# Name of an option that some mode refuses -> a key and a value that turn the option on.
OPTIONS = {
    "compile": ("compile", True),
    "accumulate=auto": ("accumulate", "auto"),
    "sync_bn": ("sync_bn", True),
    "probe": ("model.probe", True),
    "graphs": ("graphs", True),
    "shares": ("shares", "auto"),
    "verify": ("verify.every", 2),
}
# Keys and sections that model.probe=true excludes: they act on images, or on layers before the last
# one.
NOT_PROBED = {
    "augment",
    "data.train_size",
    "distill",
    "model.freeze",
    "optimizer.layer_decay",
    "recompute",
    "sync_bn",
}

# Values that data.decode=gpu needs, by key. Some transforms would draw from the GPU's generator, a
# cache has decoded photos, and nothing can replace a photo that the GPU cannot decode.
GPU_DECODING = {"augment.transforms": [], "data.cache": "off", "data.on_error": "stop"}


def resolve_schedule(recipe: Recipe, processes: int) -> str:
    """Return the schedule of the stages.

    The result is `IN_TURN` for a mode in which one stage works at a time. For all other modes, it
    is `pipeline.schedule`, whose default is streams in one process and 1F1B in several processes.
    """
    if recipe.traits.one_stage_at_a_time:
        return IN_TURN
    if recipe.pipeline.schedule:
        return recipe.pipeline.schedule
    if processes == 1:
        return STREAMS
    return "1f1b"


def ranks_per_pipeline(recipe: Recipe, processes: int) -> int:
    """Return the number of processes over which one copy of the model is divided."""
    if recipe.traits.staged and processes > 1:
        return recipe.pipeline.stages or processes
    return 1


def count_local_batches(recipe: Recipe, processes: int) -> int:
    """Return the number of local batches that a global batch is divided into."""
    return max(1, processes // ranks_per_pipeline(recipe, processes))


def divides_evenly(recipe: Recipe, count: int, accumulate: int | None = None) -> bool:
    """Return whether a batch divides into micro-batches.

    Args:
        recipe: the recipe.
        count: number of local batches.
        accumulate: number of micro-batches per local batch; the recipe's by default.
    """
    # The two images of a mixed pair must be in the same micro-batch.
    unit = (accumulate or recipe.pieces) * recipe.augment.together
    divisor = count * unit
    # If local batches may have different sizes, the batch need not be a multiple of their number.
    traits = recipe.traits
    if fixed_shares(recipe) or (traits.same_maths and not traits.micro_batches):
        divisor = unit
    return recipe.batch_size >= count * unit and recipe.batch_size % divisor == 0


def count_largest_rows(recipe: Recipe, count: int, accumulate: int | None = None) -> int:
    """Return the number of images in the largest micro-batch of any of `count` ranks."""
    return max(count_rows(recipe, count, accumulate))


def list_micro_batch_counts(recipe: Recipe, count: int) -> list[int]:
    """List the possible values of `accumulate` for `count` local batches."""
    largest = recipe.batch_size // count
    return [n for n in range(1, largest + 1) if divides_evenly(recipe, count, n)]


def count_weight_shards(recipe: Recipe, processes: int) -> int:
    """Return the number of shards of each weight."""
    if recipe.traits.exchanges == "shards":
        return recipe.fsdp.shards or processes
    return 1


def virtual_stages(recipe: Recipe, schedule: str) -> int:
    """Return the number of stages on each rank."""
    return recipe.pipeline.virtual_stages or VIRTUAL.get(schedule, 1)


def check_processes(recipe: Recipe, processes: int, nodes: int = 1) -> None:
    """Check the recipe against the number of processes.

    Args:
        recipe: the recipe.
        processes: number of processes, over all nodes.
        nodes: number of nodes.

    Raises:
        RecipeError: the mode does not support the number of processes or an option, or a batch
            cannot be divided evenly.
    """
    traits = recipe.traits
    check_options(recipe)
    if traits.processes == "one" and processes > 1:
        raise RecipeError(
            f"mode={recipe.mode} runs in 1 process, not {processes}: "
            f"type python -m trainer ... mode={recipe.mode} without torchrun and nproc=, or "
            "mode=ddp"
        )
    if traits.shared_memory and nodes > 1:
        raise RecipeError(
            f"mode={recipe.mode} shares one machine's memory and cannot span {nodes} nodes: use "
            "mode=local_sgd"
        )
    if traits.micro_batches:
        _check_pipeline(recipe, processes)
    shards = count_weight_shards(recipe, processes)
    if processes % shards:
        raise RecipeError(
            f"fsdp.shards={shards} runs in a multiple of {shards} processes, not {processes}: type "
            f"nproc={shards}, or fsdp.shards=null"
        )
    if traits.exchanges == "shards" and recipe.fsdp.offload and processes == 1:
        raise RecipeError(
            "fsdp.offload=true moves shards, but one process has none: type nproc=2, or "
            "fsdp.offload=false"
        )
    reason = explain_eager_steps(recipe, processes)
    if recipe.graphs is True and reason is not None:
        raise RecipeError(f"graphs=true is not possible here: {reason}")
    count = count_local_batches(recipe, processes)
    if not divides_evenly(recipe, count):
        factors = []
        if count == processes > 1:
            factors.append(f"{count} processes")
        elif count > 1:
            factors.append(f"{count} replicas")
        if recipe.pieces > 1:
            factors.append(f"accumulate={recipe.pieces}")
        if recipe.augment.together > 1:
            factors.append("pairs of images (mixup, cutmix)")
        raise RecipeError(
            f"batch_size={recipe.batch_size} does not divide among {' x '.join(factors)}; "
            f"try batch_size={_batch_sizes(recipe, processes)}"
        )
    check_shares(recipe, processes)
    if traits.micro_batches:
        microbatch_counts(recipe, processes)


def check_options(recipe: Recipe) -> None:
    """Check the options of the recipe.

    Raises:
        RecipeError: the mode, or another option, does not support an option.
    """
    traits = recipe.traits
    if recipe.devices != "auto":
        device_types = {device.partition(":")[0] for device in recipe.devices}
        if len(device_types) > 1:
            raise RecipeError(
                f"devices={','.join(recipe.devices)} mixes cpu and cuda; training uses one kind"
            )
    _refuse(recipe, traits.refuses)
    if recipe.data.decode == "gpu":
        values = flatten(recipe.to_dict())
        for key, value in GPU_DECODING.items():
            if values[key] != value:
                raise RecipeError(
                    f"{format_argument(key, values[key])} does not work with data.decode=gpu: "
                    f"type {format_argument(key, value)}, or data.decode=cpu"
                )
    if recipe.model.probe:
        _check_probe(recipe)
    if traits.staged and recipe.recompute == "auto":
        raise RecipeError(
            f"recompute=auto is not for mode={recipe.mode}, whose cuts are measured with it or "
            "without: use recompute=true, or recompute=false"
        )
    local_sgd = recipe.local_sgd
    if local_sgd.every and max(local_sgd.fragments, local_sgd.delay + 1) > local_sgd.every:
        raise RecipeError(
            f"local_sgd.every={local_sgd.every} is too small for local_sgd.fragments="
            f"{local_sgd.fragments} and local_sgd.delay={local_sgd.delay}: each fragment is sent "
            "at another step, and arrives before it is sent again; set "
            f"local_sgd.every={max(local_sgd.fragments, local_sgd.delay + 1)} or more"
        )
    row = OPTIMIZERS.get(recipe.optimizer.name)
    if row is not None:
        check_optimizer(recipe, row)
    if traits.exchanges == "shards" and recipe.fsdp.offload and recipe.precision == "fp16":
        raise RecipeError(
            "precision=fp16 is not for fsdp.offload=true: torch's optimizers would read the scale "
            "of the loss on the host before it has arrived there; use precision=bf16"
        )
    schedule = recipe.pipeline.schedule
    if traits.micro_batches and schedule in list_refused_schedules():
        major, minor = SINCE[TWO_PARTS]
        raise RecipeError(
            f"pipeline.schedule={schedule} needs torch {major}.{minor} or newer: torch "
            f"{read_version('torch')} crashes in its backward pass; use "
            "pipeline.schedule=interleaved1f1b, 1f1b, gpipe or loopedbfs"
        )
    if traits.micro_batches and recipe.compile and schedule in SPLIT_BACKWARD:
        raise RecipeError(
            f"compile=true is not for pipeline.schedule={schedule}, which computes the gradients "
            "of inputs and weights apart, and a compiled backward pass is one piece: use "
            "pipeline.schedule=1f1b or interleaved1f1b"
        )


def check_optimizer(recipe: Recipe, row: OptimizerTraits) -> None:
    """Check that the mode supports the recipe's optimizer, whose properties are in `row`.

    Raises:
        RecipeError: the mode does not.
    """
    needs_whole = (row.whole and not row.gathers) or row.joint
    if needs_whole and recipe.traits.exchanges == "shards":
        raise RecipeError(
            f"optimizer.name={recipe.optimizer.name} is not for mode={recipe.mode}: "
            f"{WHOLE_MATRICES}"
        )
    if row.joint and recipe.traits.staged and recipe.processes != "one":
        raise RecipeError(
            f"optimizer.name={recipe.optimizer.name} is not for mode={recipe.mode} in several "
            "processes: the step of a weight depends on weights of other stages; use "
            "pipeline.schedule=streams, or mode=ddp"
        )


def explain_eager_steps(recipe: Recipe, processes: int) -> str | None:
    """Explain why the recipe excludes CUDA graphs; None if steps may be captured."""
    if recipe.graphs is False:
        return "graphs=false says so"
    refuses = recipe.traits.refuses
    if "graphs" in refuses:
        return refuses["graphs"]
    if processes == 1 or not recipe.traits.exchanges_in_passes:
        return None
    if recipe.graphs == "auto":
        return (
            "graphs were not measured on several GPUs; graphs=true captures passes in which ranks "
            "exchange messages"
        )
    if recipe.traits.exchanges == "shards" and recipe.fsdp.offload:
        return (
            "fsdp.offload=true updates weights in host memory, which a CUDA graph cannot do; use "
            "fsdp.offload=false, or graphs=false"
        )
    return None


def _refuse(recipe: Recipe, refuses: Mapping[str, str]) -> None:
    """Raise RecipeError if the recipe turns on an option of `refuses`.

    Args:
        recipe: the recipe.
        refuses: reason why the mode does not support an option, by the name of the option.
    """
    values = flatten(recipe.to_dict())
    for option, reason in refuses.items():
        key, value = OPTIONS[option]
        # The option `shares` is also on if its value is a list, and `verify` with any interval.
        is_on = values[key] == value or isinstance(values[key], list)
        if is_on or (option == "verify" and values[key] is not None):
            raise RecipeError(
                f"{format_argument(key, values[key])} is not for mode={recipe.mode}: {reason}"
            )


def _check_probe(recipe: Recipe) -> None:
    """Raise RecipeError if any key of `NOT_PROBED` differs from its default and would act."""
    changes = compare_recipes(Recipe(), recipe)
    idle_keys = [key for key, *_ in find_idle(flatten(recipe.to_dict()), changes)]
    arguments = []
    defaults = []
    for key, (default, value) in changes.items():
        if key not in idle_keys and not NOT_PROBED.isdisjoint((key, key.partition(".")[0])):
            arguments.append(format_argument(key, value))
            defaults.append(format_argument(key, default))
    if arguments:
        raise RecipeError(
            f"model.probe=true computes the features of each image once, without "
            f"{', '.join(arguments)}: type {' '.join(defaults)}, or model.probe=false"
        )


def list_refused_schedules() -> tuple[str, ...]:
    """Return the schedules that the installed torch cannot run."""
    if torch_has(TWO_PARTS):
        return ()
    return SPLIT_BACKWARD


def _check_pipeline(recipe: Recipe, processes: int) -> None:
    """Raise RecipeError if a pipeline does not support the number of processes or of stages."""
    schedule = resolve_schedule(recipe, processes)
    stages = recipe.pipeline.stages
    virtual = recipe.pipeline.virtual_stages
    allowed = virtual
    alternatives = ", or use pipeline.schedule=interleaved1f1b or loopedbfs"
    if schedule in V_SHAPED:
        allowed = 2
        alternatives = ""
    elif schedule not in VIRTUAL:
        allowed = 1
    if virtual not in (None, allowed):
        raise RecipeError(
            f"pipeline.schedule={schedule} takes {allowed} as pipeline.virtual_stages, not "
            f"{virtual}: leave pipeline.virtual_stages out{alternatives}"
        )
    if schedule == STREAMS:
        if processes > 1:
            raise RecipeError(
                f"pipeline.schedule=streams runs in 1 process, not {processes}: type python -m "
                "trainer ... without torchrun and nproc=, or pipeline.schedule=1f1b"
            )
        return
    if processes == 1:
        need = stages or 2
        alone = "; one process: pipeline.schedule=streams"
        if (virtual or 1) > 1:
            alone = ""
        raise RecipeError(
            f"pipeline.schedule={schedule} runs in {need} processes or more, one a stage: type "
            f"torchrun --standalone --nproc_per_node={need} -m trainer ... or nproc={need}{alone}"
        )
    if stages is not None and processes % stages:
        near = format_neighbors(processes, stages)
        raise RecipeError(
            f"pipeline.stages={stages} runs in a multiple of {stages} processes, not {processes}: "
            f"type torchrun --standalone --nproc_per_node={near.split()[0]} -m trainer ... (or "
            f"nproc=), {near} would do"
        )


def microbatch_counts(recipe: Recipe, processes: int) -> list[int]:
    """List the numbers of micro-batches that a pipeline may use.

    If the recipe sets the number or the size of micro-batches, the list has a single item. In
    several processes, all micro-batches have the same size, because stages exchange tensors of one
    shape.

    Raises:
        RecipeError: the recipe's number of micro-batches is not possible, or no number is. The
            message suggests values that are possible.
    """
    schedule = resolve_schedule(recipe, processes)
    section = recipe.pipeline
    rows = recipe.batch_size // (count_local_batches(recipe, processes) * recipe.pieces)
    if schedule == STREAMS:
        # Within one process, micro-batches need not have the same size.
        if section.split_size is not None:
            return [-(-rows // min(section.split_size, rows))]
        if section.microbatches == "auto":
            # Only some numbers are candidates, because measuring each takes time.
            candidates = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
            return [count for count in candidates if count <= rows]
        if int(section.microbatches) > rows:
            raise RecipeError(
                f"pipeline.microbatches={section.microbatches} of {rows} images: at most {rows} "
                "can be"
            )
        return [int(section.microbatches)]
    possible = [
        count
        for count in range(1, rows + 1)
        if rows % count == 0 and not _explain_refusal(schedule, count, recipe, processes)
    ]
    what = f"{rows} images a step"
    if count_local_batches(recipe, processes) > 1:
        what += " and replica"
    if recipe.pieces > 1:
        what += f" (batch_size={recipe.batch_size}, accumulate={recipe.pieces})"
    if not possible:
        raise RecipeError(
            f"{what} do not divide into equal micro-batches for pipeline.schedule={schedule}, "
            f"which wants {_microbatch_step(recipe, processes)} or more of them: try "
            f"batch_size={_batch_sizes(recipe, processes)}"
        )
    if section.split_size is None and section.microbatches == "auto":
        return possible
    if section.split_size is not None:
        wanted_count = rows / section.split_size
        argument = f"pipeline.split_size={section.split_size}"
        choices = [rows // count for count in reversed(possible)]
    else:
        wanted_count = float(section.microbatches)
        argument = f"pipeline.microbatches={section.microbatches}"
        choices = possible
    if wanted_count in possible:
        return [int(wanted_count)]
    reason = None
    if wanted_count == int(wanted_count) and not rows % wanted_count:
        reason = _explain_refusal(schedule, int(wanted_count), recipe, processes)
    reason = reason or f"{what} do not divide into equal micro-batches like that"
    key = argument.partition("=")[0]
    raise RecipeError(f"{argument}: {reason}; try {key}={list_some([*map(str, choices)], 8)}")


def _explain_refusal(
    schedule: str, microbatches: int, recipe: Recipe, processes: int
) -> str | None:
    """Explain why torch's schedule refuses a number of micro-batches.

    Return None if the schedule accepts the number.
    """
    ranks = ranks_per_pipeline(recipe, processes)
    stages = ranks * virtual_stages(recipe, schedule)
    if schedule in ("1f1b", "dualpipev") and microbatches < stages:
        return (
            f"pipeline.schedule={schedule} wants at least as many micro-batches as stages "
            f"({stages})"
        )
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved1f1b", "interleavedzerobubble") and microbatches % rounds:
        return f"pipeline.schedule={schedule} wants a multiple of its {rounds} rounds"
    return None


def suggest_wider_batch(recipe: Recipe, cards: int, images: int | None = None) -> str | None:
    """Suggest arguments for a larger batch.

    Return None if there is only one GPU, if each GPU computes enough images already, if the mode
    does not divide a batch over GPUs, or if the training set is smaller than the larger batch.

    Args:
        recipe: the recipe of the run.
        cards: number of GPUs.
        images: number of images in the training set, which limits the batch.
    """
    local_batch = recipe.batch_size / cards
    # In the other modes, a GPU does not compute a local batch of its own.
    is_replicated = recipe.traits.exchanges in ("gradients", "shards", "copies", "weights")
    if cards < 2 or local_batch >= FEW_IMAGES or not is_replicated:
        return None
    factor = 2 ** math.ceil(math.log2(ENOUGH_IMAGES / local_batch))
    if images is not None and factor * recipe.batch_size > images:
        return None
    arguments = f"batch_size={factor * recipe.batch_size}"
    # The learning rate grows with the batch, after a warm-up (Goyal et al., arXiv:1706.02677). With
    # lr_per, the recipe scales it already.
    if OPTIMIZERS[recipe.optimizer.name].scales_lr and recipe.optimizer.lr_per is None:
        arguments += f" optimizer.lr={factor * recipe.optimizer.lr:g}"
        warmup = min(5, recipe.epochs // 10)
        if warmup > recipe.schedule.warmup_epochs == 0:
            arguments += f" schedule.warmup_epochs={warmup}"
    return arguments


def _microbatch_step(recipe: Recipe, processes: int) -> int:
    """Return a number of micro-batches such that the schedule accepts all multiples of it."""
    schedule = resolve_schedule(recipe, processes)
    ranks = ranks_per_pipeline(recipe, processes)
    if schedule in ("1f1b", "dualpipev"):
        return ranks * virtual_stages(recipe, schedule)
    if schedule in ("interleaved1f1b", "interleavedzerobubble"):
        return ranks
    return 1


def _batch_sizes(recipe: Recipe, processes: int) -> str:
    """Format the possible batch sizes below and above the recipe's."""
    rows = recipe.augment.together
    if recipe.traits.micro_batches:
        schedule = resolve_schedule(recipe, processes)
        section = recipe.pipeline
        count = _microbatch_step(recipe, processes)
        if section.microbatches != "auto":
            typed_count = int(section.microbatches)
            if not _explain_refusal(schedule, typed_count, recipe, processes):
                count = typed_count
        images = 1
        if section.split_size is not None and schedule != STREAMS:
            images = section.split_size
        rows = math.lcm(rows, count * images)
    return format_neighbors(
        recipe.batch_size, count_local_batches(recipe, processes) * recipe.pieces * rows
    )


def check_names(recipe: Recipe) -> None:
    """Check the names of model, data set, task, metrics, optimizer, schedule and transforms.

    Raises:
        RecipeError: a name is unknown. The message suggests the closest known name.
    """
    check_model_name(recipe.model.name)
    check_name("data.name", recipe.data.name, "a data set", DATASETS)
    check_name("task.name", recipe.task.name, "a task", TASKS)
    check_rows(recipe)
    check_metrics(recipe)
    check_transform_names(recipe.augment.transforms)


def check_rows(recipe: Recipe) -> None:
    """Check the names of the optimizer and the schedule.

    Raises:
        RecipeError: a name is unknown, or the run cannot use the optimizer.
    """
    name = recipe.optimizer.name
    reason = REFUSED.get(name)
    if reason is not None:
        raise RecipeError(f"optimizer.name={name} cannot train here: {reason}")
    check_name("optimizer.name", name, "an optimizer", OPTIMIZERS)
    if name.startswith(TIMM) and find_spec("timm") is None:
        raise RecipeError(f"optimizer.name={name} needs timm: pip install timm")
    check_name("schedule.name", recipe.schedule.name, "a schedule", LR_SCHEDULES)


def check_name(key: str, name: str, what: str, known_names: Collection[str]) -> None:
    """Raise RecipeError if `name`, the value of `key`, is not one of `known_names`."""
    if name in known_names:
        return
    guess = find_nearest(name, known_names)
    hint = ""
    if key == "data.name" and os.path.isdir(os.path.expanduser(name)):
        hint = f"for photos in a folder type data.name=imagefolder data.root={name}; "
    elif guess:
        hint = f"did you mean {key}={guess}? "
    listed = ", ".join(known_names)
    raise RecipeError(
        f"{key}={name} is not {what}; {hint}known: {listed} (your own: plugin=my_module)"
    )


def check_loggers(recipe: Recipe) -> None:
    """Check that the loggers in the recipe are installed.

    Raises:
        SetupError: a logger is not installed.
    """
    for name in ("wandb", "mlflow"):
        if not getattr(recipe.logging, name):
            continue
        spec = find_spec(name)
        # A folder of the same name, such as the one that wandb creates, has a spec without an
        # origin, and is not the library.
        if spec is None or spec.origin is None:
            raise SetupError(
                f"logging.{name} needs the library: pip install {name}, or logging.{name}=null"
            )

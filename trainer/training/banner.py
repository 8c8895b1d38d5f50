"""The banner: lines that describe a run before it trains, on the terminal and in TensorBoard."""

import shlex
from collections.abc import Mapping, Sequence

from trainer.devices import precision
from trainer.modes import Strategy
from trainer.processes.rank import find_elastic_problems
from trainer.processes.terminal import BOLD, fill
from trainer.recipe import Recipe, compare_recipes, flatten
from trainer.recipe.checks import count_largest_rows
from trainer.recipe.image_sizes import in_pixels
from trainer.recipe.known_names import OWN_PHOTOS
from trainer.recipe.loading import load_base
from trainer.recipe.recipe_files import format_argument
from trainer.recipe.schema import LossRecipe
from trainer.recipe.text import format_value
from trainer.recipe.unused import describe_unused, find_idle
from trainer.saving.run_folder import is_check_folder
from trainer.telemetry.readable import format_count, table_width
from trainer.telemetry.tracking import NullTracker
from trainer.training.memory_keys import KEPT
from trainer.training.observer import ModelFacts
from trainer.training.state import Resolved
from trainer.versions import VERSION

# If BatchNorm normalizes fewer images than this at a time, and fewer than the whole batch, the
# banner suggests remedies. Below 16 images, the error of ResNet-50 on ImageNet grows: by 1 point at
# 8 images per GPU, by 4 points at 4, by 11 points at 2 (Wu and He, "Group Normalization",
# arXiv:1803.08494, table 2).
MIN_BATCH_NORM_IMAGES = 16
# Titles of lines that a user may want to act on before training. They are printed in full.
WARNINGS = (
    "torchrun",
    "skipped",
    "warning",
    "batchnorm",
    "bf16",
    "left out",
    "ignored",
    "labels",
    "balance",
    "precision",
    "note",
    "unused",
    "fold",
    "teacher",
    "start",
    "filters",
    "inputs",
    "names",
    "alike",
    "test",
    "pixels",
    "frames",
    "beside",
)
# Titles of lines that `runs show` prints, but not the banner. The first line of the banner already
# names the mode, the devices and what `computes` says.
DETAILS = ("computes", "mode", "devices", "held out", "cuts", "readers", "folder")
# Number of lines for warnings and optional entries, in addition to the five lines that every run
# prints. Warnings are printed even if they need more lines.
SPARE_LINES = 3


def print_banner(
    recipe: Recipe, devices: Sequence[str], lines: Mapping[str, str], tracker: NullTracker
) -> None:
    """Print the most important of the banner's lines, and a command that prints all of them.

    The lines that every run prints, and those of `WARNINGS`, are printed in full. All other lines
    are printed only while they fit into a banner of about eight lines.

    Args:
        recipe: The recipe.
        devices: Names of the devices of all ranks.
        lines: The lines by title, from `build_banner`.
        tracker: Prints the lines.
    """
    where = summarize_devices(devices)
    head = f"trainer {VERSION}: {recipe.name}, {recipe.mode} on {where}, {lines['computes']}"
    head = fill(head, table_width(), indent=12)
    tracker.say(head, BOLD)
    always = {title: lines[title] for title in ("model", "data", "steps")}
    warnings = [title for title in WARNINGS if title in lines]
    titles = [title for title in lines if title not in (*warnings, *always, *DETAILS)]
    used = head.count("\n") + tracker.print_lines(always) - len(always)
    spare = max(1, SPARE_LINES - used)
    for title in warnings:
        spare -= tracker.print_lines({title: lines[title]})
    # An entry that needs more than the spare lines is left out, and only `runs show` prints it.
    for title in titles:
        spare -= tracker.print_lines({title: lines[title]}, lines=spare)
    if is_check_folder(tracker.path):
        return
    details = f"python -m trainer runs show {shlex.quote(str(tracker.path))}"
    tracker.print_lines({"details": details})


def summarize_devices(devices: Sequence[str]) -> str:
    """Summarize devices in a few words, such as `4 x cuda`."""
    kinds = {name.partition(":")[0] for name in devices}
    if len(devices) > 1 == len(kinds):
        return f"{len(devices)} x {kinds.pop()}"
    return ", ".join(devices)


def build_banner(
    resolved: Resolved, strategy: Strategy, model: ModelFacts, readers: str | None
) -> dict[str, str]:
    """Return all lines of the banner by title.

    Args:
        resolved: The configuration of the run.
        strategy: The mode, which holds this rank's part of the model.
        model: Properties of the whole model.
        readers: Description of the processes that read images. None if there are none.
    """
    recipe = resolved.recipe
    world = resolved.world
    data = resolved.datasets
    names = world.devices
    if len(names) <= 8:
        devices = ", ".join(names)
    else:
        devices = f"{names[0]} ... {names[-1]}"
    unit = "value" if resolved.task.reads == "values" else "class"
    if len(data.classes) != 1:
        unit = {"value": "values", "class": "classes"}[unit]
    outputs = f"{len(data.classes)} {unit}"
    ranks = format_count(world.size, "rank")
    threads = format_count(world.threads, "thread")
    shape = " x ".join(map(str, data.inputs.shape))
    if data.train_size:
        shape += f" (training: {in_pixels(data.train_size)})"
    options = [precision.resolve_precision(recipe.precision, world.device)]
    options += [key for key in ("channels_last", "compile", "sync_bn") if getattr(recipe, key)]
    if strategy.recompute_description:
        options.append(f"recompute {strategy.recompute_description}")
    if recipe.ema is not None:
        options.append(f"ema {recipe.ema}")
    lines = {
        "mode": f"{recipe.mode}, {ranks}, {threads} each",
        "devices": devices,
        **strategy.notes(),
        "model": f"{recipe.model.name} on {shape}, {model.parameters:,} parameters",
        "computes": ", ".join(options),
    }
    if note := precision.describe_precision(recipe.precision, world.device):
        lines["precision"] = note
    drawn = ""
    if recipe.data.fraction < 1 and not data.synthetic:
        drawn = f" (data.fraction={recipe.data.fraction:g})"
    lines["data"] = (
        f"{data.name}: {len(data.train):,} training images{drawn}, {len(data.val):,} held out, "
        f"{outputs}"
    )
    lines["held out"] = data.holdout
    if resolved.teacher:
        lines["teacher"] = resolved.teacher.note
    lines |= model.notes
    lines |= data.notes
    if readers:
        lines["readers"] = readers
    lines["steps"] = _describe_steps(resolved, strategy, model.batch_norm)
    lines["folder"] = str(resolved.tracker.path)
    unused_lines = list_unused(resolved, model)
    if "unused" in data.notes:
        unused_lines.append(data.notes["unused"])
    if unused_lines:
        lines["unused"] = "; ".join(unused_lines)
    if (few := warn_of_small_batch_norm(strategy, model.batch_norm)) is not None:
        lines["batchnorm"] = few
    if advice := find_elastic_problems():
        lines["torchrun"] = advice
    if 0 < recipe.epochs <= recipe.schedule.warmup_epochs:
        lines["warning"] = (
            "set schedule.warmup_epochs=0: the warm-up is as long as the run, and lr never "
            f"reaches {recipe.peak_lr:g}"
        )
    return lines


def list_unused(resolved: Resolved, model: ModelFacts) -> list[str]:
    """Describe the keys that have no effect for a reason that `find_idle` cannot know.

    Such reasons are the number of processes, the devices, the model and the data set.

    Args:
        resolved: The configuration of the run.
        model: Properties of the whole model.
    """
    recipe = resolved.recipe
    data = resolved.datasets
    causes = {}
    if resolved.world.size == 1:
        several = (
            "sync_bn ddp.compress shares fsdp.reshard "
            "local_sgd.every local_sgd.outer_lr local_sgd.outer_momentum "
            "local_sgd.fragments local_sgd.delay local_sgd.compress"
        )
        causes = dict.fromkeys(several.split(), "1 process")
    if resolved.world.device.type == "cpu":
        causes |= dict.fromkeys(("graphs", "deterministic", "fsdp.offload"), "CPU devices")
    if precision.resolve_precision(recipe.precision, resolved.world.device) != recipe.precision:
        causes["precision"] = "a device that has no TF32"
    if not model.batch_norm:
        normalizing = ("sync_bn", "pipeline.deferred_batch_norm")
        causes |= dict.fromkeys(normalizing, "a model that has no BatchNorm")
    if data.is_in_memory:
        causes |= dict.fromkeys(("data.cache", "data.workers", "data.decode"), "images in memory")
    if recipe.data.name in OWN_PHOTOS and data.holdout_table is None:
        causes["data.val_fraction"] = f"images that have a validation split: {data.holdout}"
    for key in LossRecipe.model_fields:
        if not resolved.task.uses_key(key):
            causes[f"loss.{key}"] = f"task.name={recipe.task.name}"
    steps = recipe.epochs * resolved.steps_per_epoch
    if recipe.max_steps is not None and recipe.max_steps > steps:
        causes["max_steps"] = f"{format_count(recipe.epochs, 'epoch')} of {steps} steps in all"
    restarts = recipe.schedule.restarts
    reached = [epoch for epoch in restarts if epoch < recipe.epochs]
    changes = compare_recipes(load_base(recipe), recipe)
    known_keys = [key for key, *_ in find_idle(flatten(recipe.to_dict()), causes)]
    lines = []
    if 0 < len(reached) < len(restarts):
        late = f"schedule.restart={format_value([*restarts][len(reached) :])}"
        lines.append(describe_unused(late, f"epochs={recipe.epochs}"))
    for key, cause in causes.items():
        # Report only typed keys: a recipe may set a key for other machines, on which it acts.
        if key in recipe.typed and key in changes and key not in known_keys:
            lines.append(describe_unused(format_argument(key, changes[key][1]), cause))
    return lines


def _describe_steps(resolved: Resolved, strategy: Strategy, has_batch_norm: bool) -> str:
    """Return the banner's line about epochs, steps and the division of a batch."""
    recipe = resolved.recipe
    share_count = strategy.share.count
    if recipe.traits.every_sample:
        owner = "worker"
    else:
        owner = "replica" if share_count < resolved.world.size else "device"
    local_batch = count_largest_rows(recipe, share_count, 1)
    rows = count_largest_rows(recipe, share_count, recipe.pieces)
    at_most = ""
    if share_count * recipe.pieces * rows != recipe.batch_size:
        at_most = " at most"
    per_epoch = resolved.steps_per_epoch
    text = f"{format_count(recipe.epochs, 'epoch')} x {format_count(per_epoch, 'step')}"
    if recipe.max_steps and recipe.max_steps <= recipe.epochs * per_epoch:
        text += f", {recipe.max_steps} in all at most,"
    text += f" of {recipe.batch_size} images"
    shares = compute_shares(strategy)
    if shares is not None:
        text += f", {' + '.join(map(str, shares))} a {owner}"
        if recipe.pieces > 1:
            text += f", in {recipe.pieces} pieces each"
    else:
        if share_count > 1:
            text += f", {share_count} x {local_batch}{at_most} a {owner}"
        if recipe.pieces > 1:
            text += f", in {recipe.pieces} pieces of {rows}{at_most}"
    if KEPT in strategy.tuned:
        text += " (accumulate=auto)"
        if recipe.pieces > 1 and has_batch_norm:
            text += ", each with its own BatchNorm statistics"
    restarts = [f"{epochs:.4g}" for epochs in recipe.schedule.restarts if epochs < recipe.epochs]
    if restarts:
        text += f"; a new cosine from lr {recipe.peak_lr:g} after epoch {', '.join(restarts)}"
    return text


def compute_shares(strategy: Strategy) -> list[int] | None:
    """Return the number of images that each rank computes in a step.

    Return None if neither the recipe nor a measurement sets the shares.
    """
    recipe = strategy.recipe
    share = strategy.share
    if share.numbers:
        return [recipe.pieces * rank_rows for rank_rows in share.count_rows(recipe)]
    return None


def warn_of_small_batch_norm(strategy: Strategy, has_batch_norm: bool) -> str | None:
    """Return a suggestion if BatchNorm normalizes too few images at a time.

    Returns:
        The suggestion. None if there are enough images, if they are the recipe's whole batch, or if
        the model has no BatchNorm.
    """
    recipe = strategy.recipe
    share_count = strategy.share.count
    rows = min(strategy.share.count_rows(recipe))
    remedies = ["a larger batch_size"]
    if recipe.pieces > 1:
        remedies.append("a smaller accumulate")
    if recipe.sync_bn:
        rows = recipe.batch_size // recipe.pieces
    elif share_count > 1 and "sync_bn" not in recipe.traits.refuses:
        remedies.insert(0, "sync_bn=true")
    elif recipe.traits.exchanges == "copies" and strategy.world.device.type == "cuda":
        rows = -(-rows // len(strategy.world.local_devices))
        remedies.insert(0, "mode=ddp sync_bn=true")
    elif recipe.traits.micro_batches:
        whole = rows
        rows = strategy.result_fields()["pipeline"]["split_size"]
        if whole >= 2 * MIN_BATCH_NORM_IMAGES:
            remedies.insert(0, f"pipeline.microbatches={whole // MIN_BATCH_NORM_IMAGES} or fewer")
    if not has_batch_norm or rows >= MIN_BATCH_NORM_IMAGES or rows == recipe.batch_size:
        return None
    return (
        f"try {', '.join(remedies)}: mean and variance are over {format_count(rows, 'image')} at a "
        f"time, and below {MIN_BATCH_NORM_IMAGES} they are too rough, so accuracy suffers and "
        "losses differ from mode=single. Or use a model without BatchNorm (cnn_gn, vit_tiny, "
        "vit_b_16, convnext_tiny)"
    )

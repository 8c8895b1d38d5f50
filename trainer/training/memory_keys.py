"""Choose `accumulate` and `recompute` so that a run fits in memory, and recover if it does not.

With `accumulate=auto`, a batch is divided into the smallest number of micro-batches whose passes
fit in the memory of every rank. On GPUs, trial passes before training find this number, starting
with the smallest micro-batches. On CPUs, there are no trials: the number is 1 until memory runs
out. The run folder stores the number, which is used again on the same devices. If memory runs out
in training, the run or its next attempt resumes with at least twice as many micro-batches.

With `recompute=auto`, a GPU recomputes the activations of the first N blocks of the model, with the
smallest N for which a step fits the GPU's memory. On CPUs, no block is recomputed.
"""

import math
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.data import Example, count_steps_per_epoch
from trainer.devices.precision import autocast
from trainer.errors import DeviceMemoryError, RecipeError, TrainerError, is_out_of_memory, read_line
from trainer.launch.endings import SMALLER, SMALLER_AFTER
from trainer.memory.device import (
    compute_usable_bytes,
    forget_memory,
    free_memory,
    peak_memory,
    release_garbage,
    total_memory,
)
from trainer.memory.measuring import count_bytes, measure_pass
from trainer.memory.needs import (
    COPIES,
    compute_unit_sizes,
    count_gathered,
    count_teacher_bytes,
    find_fewest,
    find_fewest_pieces,
)
from trainer.models.recompute import list_runs, recompute
from trainer.models.shapes import build_on_meta, copy_to_meta
from trainer.models.undisturbed import restore_after
from trainer.modes.flattening import flatten_tensors, unflatten_into
from trainer.modes.fsdp_units import find_units
from trainer.recipe import Recipe
from trainer.recipe.checks import (
    check_processes,
    count_largest_rows,
    count_weight_shards,
    divides_evenly,
    list_micro_batch_counts,
)
from trainer.recipe.shares import fixed_shares
from trainer.saving.checkpoint import checkpoints_in
from trainer.saving.run_folder import TUNED
from trainer.telemetry.readable import format_count, format_size
from trainer.training.initial_model import build_for_dataset
from trainer.training.parts import PARTS
from trainer.training.randomness import read_random_states, restore_random_states
from trainer.training.run import Run
from trainer.training.state import Opened, Resolved, TrainState

# Key of the number of micro-batches in the tuning file of the run folder, with accumulate=auto.
KEPT = "accumulate"


@contextmanager
def explain_out_of_memory(find_run: Callable[[], Run | None]) -> Iterator[None]:
    """Raise DeviceMemoryError, which suggests keys to change, if memory runs out in this block.

    Args:
        find_run: Function that returns the current run, or None. With the run itself as an
            argument, a run that is replaced within the block could not be freed.
    """
    try:
        yield
    except Exception as error:
        run = find_run()
        if run is None or isinstance(error, TrainerError) or not is_out_of_memory(error):
            raise
        needs = describe_needs(run.resolved, run.state)
        raise DeviceMemoryError(f"{needs} ({read_line(error) or type(error).__name__})") from error


def describe_needs(resolved: Resolved, state: TrainState) -> str:
    """Return an out-of-memory message, with suggestions for keys that need less memory.

    The message also reports the memory of weights, gradients and optimizer state.
    """
    recipe = resolved.recipe
    world = resolved.world
    traits = recipe.traits
    tuned = state.strategy.tuned
    tensors: list[Tensor] = []
    for kind in PARTS:
        if kind.trains:
            tensors += kind(resolved, state).tensors().values()
    # A gradient has the size of its parameter, so each trained parameter is counted a second time.
    tensors += [parameter for parameter in state.parameters.values() if parameter.requires_grad]
    # Tensors that fsdp.offload keeps on the host do not use the device's memory, so they are left
    # out.
    device_type = world.device.type
    resident = count_bytes(*(tensor for tensor in tensors if tensor.device.type == device_type))
    count = state.strategy.share.count
    remedies = []
    # With accumulate=auto, the program chooses the number of micro-batches, so none is suggested.
    if recipe.accumulate != "auto":
        numbers = range(recipe.pieces + 1, recipe.batch_size // count + 1)
        more = next((n for n in numbers if divides_evenly(recipe, count, n)), None)
        if more is not None:
            remedies.append(
                f"accumulate={more} or more, which computes the same batch in smaller pieces"
            )
            if KEPT not in tuned and "accumulate=auto" not in traits.refuses:
                remedies.append("accumulate=auto, which finds their number")
    may_recompute = recipe.recompute is not True and recipe.graphs is not True
    if may_recompute and (traits.staged or list_runs(state.strategy.module)):
        remedies.append("recompute=true, which is slower")
    if (
        traits.exchanges == "shards"
        and state.strategy.gradient_device.type == "cuda"
        and recipe.precision != "fp16"
        and world.size > 1
    ):
        remedies.append("fsdp.offload=true, which is slower")
    if fixed_shares(recipe):
        remedies.append(f"a smaller number for rank {world.rank} in shares")
    smaller_batch = "a smaller batch_size"
    if recipe.accumulate == "auto" and len(list_possible_numbers(resolved)) < 3:
        divisible = recipe.batch_size // (4 * count) * 4 * count
        if 0 < divisible < recipe.batch_size:
            smaller_batch = f"batch_size={divisible}, which divides into more pieces"
    remedies.append(smaller_batch)
    if (
        KEPT in tuned
        and (number := find_double(list_possible_numbers(resolved), recipe.pieces)) is not None
    ):
        folder = resolved.tracker.path or recipe.output
        again = "the same arguments,"
        if folder:
            again = f"recipe={shlex.quote(str(folder))} output={shlex.quote(str(folder))}"
        remedies = [f"{again} resume=auto, as {SMALLER}, {number}", smaller_batch]
    if not traits.staged and traits.exchanges != "shards":
        remedies.append(
            "for a model too big for one device, mode=fsdp or mode=pipeline with nproc=2"
        )
    total = format_size(total_memory(world.device))
    return (
        f"out of memory on {world.name}, which has {total}: weights, gradients and optimizer take "
        f"{format_size(resident)}; type {', or '.join(remedies)}"
    )


def list_possible_numbers(opened: Opened) -> list[int]:
    """Return the numbers of micro-batches into which the batch can be divided, in rising order."""
    recipe = opened.recipe
    share = opened.share
    numbers = []
    for number in list_micro_batch_counts(recipe, share.count):
        with suppress(RecipeError):
            accumulating = recipe.replace(accumulate=number)
            count_steps_per_epoch(len(opened.datasets.train), accumulating, share)
            numbers.append(number)
    return numbers


def find_double(numbers: list[int], before: int) -> int | None:
    """Return the first of `numbers` that is at least twice `before`, or None."""
    return next((number for number in numbers if number >= 2 * before), None)


def resolve_and_build(opened: Opened, build: Callable[[Resolved], Run]) -> Run:
    """Choose `recompute` and `accumulate` if they are auto, then build the run. Collective.

    On a GPU, accumulate=auto needs a probe, unless the run folder contains the number. The probe is
    a run that is built for a single micro-batch, and whose passes are measured. If one micro-batch
    fits, and the recipe does not compile the model, the probe becomes the run that trains. In all
    other cases the probe is deleted before the run that trains is built.

    Args:
        opened: The configuration without values that depend on memory.
        build: Builds a run. Its models start with the same weights in each call.

    Raises:
        DeviceMemoryError: Memory is too small even for the largest number of micro-batches.
    """
    tracker = opened.tracker
    world = opened.world
    recipe, recomputed = choose_recompute(opened)
    tuned = world.broadcast_object(tracker.folder.read(TUNED, tracker.say))

    def resolve(chosen: Recipe) -> Resolved:
        return Resolved(**{**vars(opened), "recipe": chosen}, recomputed=recomputed, tuned=tuned)

    if recipe.accumulate != "auto":
        run = build(resolve(recipe))
        run.strategy.tuned.pop(KEPT, None)
        return run
    devices = [(device.type, total_memory(device)) for device in world.local_devices]

    def describe_purpose(recompute: object) -> str:
        return (
            f"{recipe.mode} {recipe.precision} {recompute} {recipe.shares} {world.size} x {devices}"
        )

    purpose = describe_purpose(recipe.recompute)
    # Earlier versions stored the value of `recompute` as the user typed it, which may be auto. A
    # number that was stored with that value is valid too.
    purposes = purpose, describe_purpose(opened.recipe.recompute)

    def build_probe() -> Run:
        # The probe is not compiled, because torch would compile it again for each size of a
        # micro-batch.
        return build(resolve(recipe.replace(compile=False)))

    number = _recall_number(opened, tuned.get(KEPT), purposes, build_probe)
    probe_run = None
    if number is None:
        probe_run = build_probe()
        number = _find_smallest_that_fits(probe_run, list_possible_numbers(opened))
    if number > 1 or recipe.compile:
        recipe = recipe.replace(accumulate=number)
        if probe_run:
            probe_run.loader.close()
            probe_run.strategy.close()
            probe_run = None
            # Reference cycles keep the probe's device memory until they are collected.
            release_garbage()
    run = probe_run or build(resolve(recipe))
    run.strategy.tuned[KEPT] = {"pieces": number, "for": purpose}
    return run


def _recall_number(
    opened: Opened, kept: object, purposes: Sequence[str], build_probe: Callable[[], Run]
) -> int | None:
    """Return the number of micro-batches that an earlier attempt found. Collective.

    If memory ran out in that attempt, the result is at least twice the number.

    Args:
        opened: The configuration of the run.
        kept: The value of `KEPT` in the tuning file, or None.
        purposes: Strings with the devices and keys that determine the number. A stored number is
            valid only if one of these strings is stored with it.
        build_probe: Builds a run for the error message if there is no larger number.

    Returns:
        The number. If the file has no valid number, the result is 1 on a CPU, and None on a GPU,
        where trial passes must find the number.

    Raises:
        DeviceMemoryError: Memory ran out in that attempt, and no possible number of micro-batches
            is at least twice the number of that attempt.
    """
    world = opened.world
    numbers = list_possible_numbers(opened)
    before = None
    if isinstance(kept, Mapping) and kept.get("for") in purposes:
        before = kept.get("pieces")
    was_short = str(opened.tracker.journal.last_end).startswith("out of memory")
    was_short, before = world.broadcast_object((was_short, before))
    if before not in numbers:
        return 1 if world.device.type == "cpu" else None
    if not was_short:
        return int(before)
    number = find_double(numbers, before)
    if number is None:
        probe = build_probe()
        raise DeviceMemoryError(describe_needs(probe.resolved, probe.state))
    opened.tracker.say(
        f"accumulate=auto: memory ran out with {format_count(before, 'piece')}, now there are "
        f"{number}"
    )
    return number


def _find_smallest_that_fits(run: Run, numbers: list[int]) -> int:
    """Return the smallest of `numbers` of micro-batches whose trial passes fit. Collective."""
    share = run.strategy.share
    all_rows = {number: share.count_rows(run.recipe, number) for number in numbers}

    def measure_load(number: int) -> float:
        return _measure_load(run, all_rows[number][share.index], min(2, number))

    largest = {number: max(rows) for number, rows in all_rows.items()}
    fitting = find_fewest_pieces(largest, measure_load, run.observer.model.batch_norm)
    if fitting is None:
        raise DeviceMemoryError(describe_needs(run.resolved, run.state))
    return fitting


def _measure_load(run: Run, rows: int, passes: int) -> float:
    """Run trial passes, and return the fraction of a device's available memory that they need.

    The result is that of the fullest device of all ranks. If it is larger than 1, the passes do not
    fit. Weights, buffers and random states are restored afterwards, and gradients are deleted.
    Collective.

    Args:
        run: The probe.
        rows: Number of images of this rank's micro-batch.
        passes: Number of trial passes.
    """
    strategy = run.strategy
    world = run.world
    devices = world.local_devices
    apart = strategy.has_local_passes
    load = 0.0
    forget_memory(devices)
    with restore_after(strategy.modules(), *devices, weights=True):
        strategy.train_for_probe()
        try:
            batch = strategy.context.example.batch(world.device, rows, run.recipe.channels_last)
            # The second pass runs while the gradients of the first exist, as in a step, so that the
            # measured peak includes them.
            for _ in range(passes):
                if run.teacher:
                    run.teacher.teach(batch)
                strategy.forward_backward(batch, 1 / run.recipe.batch_size, sync=not apart)
        except Exception as error:
            # If passes communicate, the other ranks wait for this rank, so the run must fail.
            if not apart or not is_out_of_memory(error):
                raise
            load = math.inf
    if not apart:
        strategy.reduce_gradients()
    # At the end of a pass with captured exchanges, a message of each gradient exists, too.
    at_the_end = 0
    if strategy.captures_exchange and world.device.type == "cuda":
        gradients = [p.grad for p in strategy.named_parameters().values() if p.grad is not None]
        at_the_end = torch.cuda.memory_allocated(world.device) + count_bytes(*gradients)
    run.state.updater.zero_grad()
    sharing = world.sharing()
    for device in devices:
        # If several ranks share the device, each is assumed to have reserved as much as this rank.
        free = free_memory(device) + sharing * torch.cuda.memory_reserved(device)
        available = compute_usable_bytes(free, sharing)
        load = max(load, max(peak_memory(device), at_the_end) / max(1.0, available))
    return float(world.max_(torch.tensor(load)))


@contextmanager
def undo_on_out_of_memory(run: Run) -> Iterator[None]:
    """Restore buffers and random states if memory runs out in this block with accumulate=auto.

    In this case `run.repeatable` is set, so that `adapt_recipe` saves the run as it was before the
    block. The error is raised again. With several ranks nothing is restored: the other ranks wait
    for the failed pass, so no checkpoint can be saved.
    """
    if KEPT not in run.strategy.tuned or run.world.size > 1:
        yield
        return
    before = [flatten_tensors(buffers) for buffers in run.buffers]
    states = read_random_states(run.world.local_devices)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            for row, buffers in zip(before, run.buffers, strict=True):
                unflatten_into(row, buffers)
            restore_random_states(states, run.world.local_devices)
            run.repeatable = True
        raise


def adapt_recipe(run: Run, error: BaseException, since: float) -> Recipe | None:
    """Save a run that ran out of memory, and return the recipe with which it resumes.

    The run resumes from its last step, or from the newest checkpoint if the failed step had already
    changed the state.

    Args:
        run: The run that has ended.
        error: The error that ended it.
        since: The value of `time.monotonic()` when memory ran out in an earlier attempt, or -inf.

    Returns:
        The recipe, or None if the run must end. The run must end after any other error, with
        several ranks, without accumulate=auto, without a checkpoint, if no larger number of
        micro-batches is possible, or less than SMALLER_AFTER seconds after `since`.
    """
    path = run.tracker.path
    is_short = (
        isinstance(error, DeviceMemoryError) and KEPT in run.strategy.tuned and run.world.size == 1
    )
    if not is_short or path is None or time.monotonic() - since < SMALLER_AFTER:
        return None
    number = find_double(list_possible_numbers(run.resolved), run.recipe.pieces)
    if number is None:
        return None
    step = run.state.position.step
    source = "its newest checkpoint"
    run.state.updater.zero_grad()
    with suppress(TrainerError, RuntimeError, MemoryError):
        if run.repeatable:
            run.snapshots.save()
        # The previous checkpoint may not be complete yet, so wait for it.
        run.snapshots.finish_saving()
        if run.repeatable:
            source = f"step {step}"
    if not checkpoints_in(path / "checkpoints"):
        return None
    run.tracker.say(
        f"out of memory after step {step}: resuming from {source}, in {number} pieces of a batch"
    )
    return run.recipe.replace(output=str(path), resume="auto", accumulate="auto")


def choose_recompute(opened: Opened) -> tuple[Recipe, int | None]:
    """Choose `recompute` if it is auto. A CPU recomputes no block. Collective.

    Returns:
        `(recipe, count)`: `recipe` has the chosen `recompute`. `count` is the number of blocks to
        recompute, counted from the start of the model, or None if `recompute` was not auto.

    Raises:
        RecipeError: Blocks must be recomputed, but another key of the recipe does not allow it.
    """
    recipe = opened.recipe
    world = opened.world
    count = 0
    if recipe.recompute != "auto":
        return recipe, None
    if world.device.type == "cuda":
        # If the model cannot be built on one rank, all ranks raise the error.
        model = world.all_or_none(lambda: _build_without_values(opened))
        weights = count_bytes(*model.parameters())
        teacher_bytes = 0
        # If the mode shards models, the teacher moves to the device later, so its memory must be
        # subtracted here. In other modes it is on the device already, and free memory excludes it.
        if opened.teacher and recipe.traits.exchanges == "shards":
            shards = count_weight_shards(recipe, world.size)
            teacher_bytes = count_teacher_bytes(opened.teacher.size, weights, shards)
        available = compute_usable_bytes(free_memory(world.device), world.sharing(), teacher_bytes)
        example = opened.datasets.example(count_largest_rows(recipe, opened.share.count))
        count = count_blocks_to_recompute(model, recipe, example, available, world.size)
    count = int(world.max_(torch.tensor(count)))
    recipe = recipe.replace(recompute=count > 0)
    check_processes(recipe, world.size)
    return recipe, count


def _build_without_values(opened: Opened) -> nn.Module:
    """Build the model on the meta device, or with values if its code needs them."""
    states = read_random_states()

    def make() -> nn.Module:
        return build_for_dataset(opened.recipe, opened.task, opened.datasets, starting=False)

    # torch warns about each tensor that a model's code loads into a parameter on the meta device.
    # The values are not needed here, so hide these warnings.
    with warnings.catch_warnings(action="ignore"):
        model, _ = build_on_meta(make)
    if model is None:
        restore_random_states(states)
        model = make()
    return model


def count_blocks_to_recompute(
    model: nn.Module, recipe: Recipe, example: Example, memory: float, processes: int
) -> int:
    """Return the smallest N for which a step fits if the first N blocks are recomputed.

    Args:
        model: The model.
        recipe: The recipe.
        example: Shapes of a micro-batch.
        memory: Available memory in bytes.
        processes: Number of ranks.

    Returns:
        The number N. It is the number of all blocks if no N fits, and 0 if the model cannot run
        without values, so that its memory is not known.
    """
    shards = count_weight_shards(recipe, processes)
    runs = list_runs(model)

    def fits(count: int) -> bool:
        copy = copy_to_meta(model).train()
        recompute(copy, runs[:count], random=False)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            autocast(torch.device("cpu"), recipe.precision),
        ):
            copy._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))  # type: ignore[no-untyped-call]
            inputs = example.batch(torch.device("cpu"), channels_last=recipe.channels_last).inputs
            needed: float = measure_pass(copy, copy, inputs).peak + count_bytes(inputs)
        weights = count_bytes(*copy.parameters())
        if shards > 1:
            # A rank also holds the gathered weights of a few units at a time.
            needed += count_gathered(compute_unit_sizes(copy, find_units(copy)))
        copies = COPIES + (recipe.ema is not None)
        return needed + weights * copies / shards <= memory

    try:
        # The copies share closures and globals with the model. A pass may change the state of
        # these, so it is restored.
        with restore_after([model]):
            return find_fewest(len(runs), fits)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError, LookupError):
        return 0

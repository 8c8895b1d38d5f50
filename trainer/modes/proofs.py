"""Comparison of sharded weights or recomputed blocks with the whole model.

Rank 0 has the whole model before it is sharded, and runs two training passes. Then all ranks run
the same passes of the sharded model: each rank's rows of the summed gradients must equal rank 0's
gradients of the whole model times the number of ranks. The comparison itself is
`models.equivalence`.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from trainer.devices.cuda_graphs import read_device_states
from trainer.errors import RecipeError, is_out_of_memory, read_line
from trainer.models.blocks import refreeze
from trainer.models.equivalence import (
    Passes,
    Tensors,
    check_equivalent,
    observe,
    try_fewest_rows,
)
from trainer.models.norms import list_training_norms
from trainer.models.recompute import ALTERNATIVE, Run, recompute
from trainer.modes.context import Context
from trainer.modes.state import ModelState

# Maximum relative error of a comparison, by precision. A model with a larger error is refused.
# Equal models differ a little, because sums over ranks and nondeterministic kernels add in another
# order than the whole model does.
SHARDED_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
# Minimum divisor of relative errors, as a fraction of the norm of the whole gradient.
FLOOR = 1e-2
# Minimum number of samples of a pass under sync_bn. The variance of a few values is mostly rounding
# error, which depends on the order of addition and so on the number of ranks.
SYNCHRONISED_ROWS = 8


def observe_whole(context: Context, model: nn.Module) -> tuple[Passes, int] | None:
    """Run two training passes of the whole model on rank 0 and observe them. Collective.

    Returns:
        (passes, rows) on rank 0: the passes, and the number of samples of each pass. None on the
        other ranks, or if the model does not fit on the device.
    """
    name = f"model.name={context.recipe.model.name}"
    most = context.example.rows
    least = 1
    if context.recipe.sync_bn:
        least = min(most, SYNCHRONISED_ROWS)

    def observe_passes(rows: int) -> tuple[Passes, int]:
        rows = max(rows, least)
        try:
            return _observe_passes(context, model.to(context.world.device), rows), rows
        finally:
            model.to("cpu")

    def observe_on_main() -> tuple[Passes, int] | None:
        if not context.world.is_main:
            return None
        return try_fewest_rows(most, observe_passes, context.say, name)

    return context.world.all_or_none(observe_on_main)


def recompute_proven(
    context: Context,
    model: nn.Module,
    runs: Sequence[Run],
    kept: Sequence[Run],
) -> bool:
    """Let blocks recompute their activations, and compare the model with the original. Collective.

    With `compile=true` the blocks in `runs` and `kept` are compiled, unless weights are sharded:
    shards are compiled per unit.

    Args:
        context: recipe, world and example of the mode that trains the model.
        model: the whole model, on the CPU.
        runs: for each group of modules that recomputes its activations, the names of the modules.
        kept: the same for all other groups, which keep their activations.

    Returns:
        True if some block in `runs` draws random numbers. False if none does, or if memory is too
        small for the comparison.

    Raises:
        RecipeError: recomputation changes the gradients, or the blocks cannot be recomputed.
    """
    name = f"model.name={context.recipe.model.name}"
    whole = observe_whole(context, model)
    is_sharded = context.recipe.traits.exchanges == "shards" and context.world.size > 1
    compiles = context.recipe.compile and not is_sharded
    recompute(model, runs, compiles=compiles, kept=kept if compiles else ())

    def compare_on_main() -> bool:
        if not whole:
            return False
        original, rows = whole
        modules: list[nn.Module] = []
        for run in runs:
            modules += map(model.get_submodule, run)
        try:
            with _observe_draws(modules, context.world.device) as observed_draws:
                recomputed = _observe_passes(context, model.to(context.world.device), rows)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            if "inplace operation" in str(error):
                reason = "changes a block's inputs in place"
            else:
                reason = read_line(error)
            raise RecipeError(
                f"{name} {reason}, so its blocks cannot be recomputed: use {ALTERNATIVE}"
            ) from error
        finally:
            model.to("cpu")
        tolerance = SHARDED_TOLERANCE[context.recipe.precision]
        title = f"{name} with recompute=true"
        check_equivalent(title, original, recomputed, tolerance, FLOOR, ALTERNATIVE)
        return any(observed_draws)

    draws_numbers = context.world.all_or_none(compare_on_main)
    return bool(context.world.broadcast_object(draws_numbers))


@contextmanager
def _observe_draws(modules: Iterable[nn.Module], device: torch.device) -> Iterator[list[bool]]:
    """Return a context whose value is a list with one bool per forward pass of a module.

    The bool is appended when the pass ends. It is True if the pass draws random numbers from
    torch's generators of the CPU or of `device`. No other generators are observed.
    """
    draws = []
    states_before = {}

    devices = [torch.device("cpu"), device]

    def begin(module: nn.Module, *_: Any) -> None:
        states_before[module] = read_device_states(devices)

    def end(module: nn.Module, *_: Any) -> None:
        states = read_device_states(devices)
        draws.append(not all(map(torch.equal, states_before[module], states)))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield draws


def seed_alike() -> None:
    """Seed the global random generators with the same value on all ranks."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _observe_passes(context: Context, model: nn.Module, rows: int, **options: Any) -> Passes:
    """Run two training passes of `rows` random samples each and observe them."""

    def train() -> None:
        seed_alike()
        model.train()
        refreeze(model)

    batches = torch.split(context.sample(2 * rows), rows)
    run = partial(context.in_precision, model)
    with torch.compiler.set_stance("force_eager"), use_deterministic_kernels():
        return observe(model, train, run, batches, **options)


@contextmanager
def use_deterministic_kernels() -> Iterator[None]:
    """Use deterministic kernels where torch has them.

    The different rounding of other kernels would look like an error.
    """
    mode = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


def check_sharded(
    state: ModelState,
    whole: tuple[Passes, int] | None,
    reduce_gradients: Callable[[], None],
) -> None:
    """Compare this rank's shards of the gradients with those of the whole model. Collective.

    Args:
        state: the sharded model.
        whole: the result of `observe_whole`.
        reduce_gradients: function that is called after the second backward pass.

    Raises:
        RecipeError: the gradients of some rank differ. Raised on every rank.
    """
    world = state.world
    parameters = state.named_parameters()
    rows = world.broadcast_object(whole[1] if whole else 0)
    if not rows:
        return

    def after(is_last: bool) -> None:
        if is_last:
            reduce_gradients()

    sharded = _observe_passes(state.context, state.module, rows, after=after, parameters=parameters)
    expected, norm = _own_rows(state, whole[0].gradients if whole else {})
    # Only rank 0 has observed the whole model. On the other ranks, only the gradients are compared:
    # all other values are those of the sharded model itself.
    passes = (whole[0] if whole else sharded)._replace(gradients=expected)
    if state.recipe.sync_bn:
        # The running variance is not compared: under sync_bn it covers the samples of all ranks,
        # which changes the divisor of the unbiased variance.
        for layer in list_training_norms(state.module):
            for tensors in (*passes.tensors, *sharded.tensors):
                tensors.pop(f"buffer {layer}.running_var", None)
    name = f"model.name={state.recipe.model.name} in shards"
    tolerance = SHARDED_TOLERANCE[state.recipe.precision]
    world.all_or_none(lambda: check_equivalent(name, passes, sharded, tolerance, FLOOR * norm))


def _own_rows(state: ModelState, gradients: Tensors) -> tuple[Tensors, float]:
    """Return this rank's rows of rank 0's gradients, multiplied by the number of ranks. Collective.

    Args:
        state: the sharded model.
        gradients: on rank 0 the whole model's gradients; empty on other ranks.

    Returns:
        (rows, norm): the rows by name, and the norm of all gradients multiplied by the number of
        ranks.
    """
    world = state.world
    types: dict[str, torch.dtype | None] = {}
    float_gradients = []
    for name, gradient in gradients.items():
        types[name] = None
        if gradient is not None:
            types[name] = gradient.dtype
            float_gradients.append(gradient.float())
    types, norm = world.broadcast_object((types, get_total_norm(float_gradients).item()))
    expected: Tensors = dict.fromkeys(types)
    pieces = state.layout(state.named_parameters()).values()
    for (name, dtype), piece in zip(types.items(), pieces, strict=True):
        if dtype is None:
            continue
        gradient = gradients.get(name)
        if gradient is None:
            gradient = torch.empty(piece.shape, dtype=dtype, device=state.device)
        whole = world.broadcast_(gradient.contiguous())
        rows = whole.narrow(0, piece.start, len(piece.local))
        expected[name] = rows.to(state.gradient_device) * world.size
    return expected, norm * world.size

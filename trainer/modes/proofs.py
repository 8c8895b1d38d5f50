"""Proof that sharded weights, blocks that are computed anew, or stages train as the whole model does: that of
`models.equivalence`, over ranks.

Rank 0 has the whole model before it is sharded, and makes two passes of it. Then all ranks make the same passes of the
sharded one: each rank's rows of the summed gradients are those of rank 0's whole ones, so many times. Stages are held
against it before they are placed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.devices.precision import AUTOCAST
from trainer.errors import RecipeError, is_out_of_memory, text_of
from trainer.models.blocks import hold_statistics
from trainer.models.equivalence import (
    AS_IT_IS,
    TOLERANCE,
    Passes,
    Tensors,
    changing,
    check_equivalent,
    draws,
    fewest_rows,
    observe,
)
from trainer.models.norms import statistics_layers, training_norms
from trainer.models.partition import Traced
from trainer.models.recompute import WITHOUT, Run, recompute
from trainer.models.undisturbed import undisturbed
from trainer.processes.world import DATA_PATIENCE

if TYPE_CHECKING:
    from trainer.modes.base import Strategy
    from trainer.modes.pipeline.stages import Staged

SHARDED_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # sums over ranks, kernels that race
FLOOR = 1e-2  # of the whole model's gradient
SYNCHRONISED_ROWS = 8


def observe_whole(strategy: Strategy, model: nn.Module) -> tuple[Passes, int] | None:
    """On rank 0: two training passes of the model on its device, and of how many rows. None if it does not fit."""

    def passes(rows: int) -> tuple[Passes, int]:
        try:
            return _passes(strategy, model.to(strategy.device), rows), rows
        finally:
            model.to("cpu")

    name, most = f"model.name={strategy.recipe.model.name}", strategy.context.example.rows
    # Of few values a variance is hardly more than rounding, which ranks that share it do in another order.
    least = min(most, SYNCHRONISED_ROWS) if strategy.recipe.sync_bn else 1

    def on_main() -> tuple[Passes, int] | None:
        if not strategy.world.is_main:
            return None
        return fewest_rows(most, lambda rows: passes(max(rows, least)), strategy.context.say, name)

    return strategy.world.all_or_none(on_main, DATA_PATIENCE)


def recompute_proven(strategy: Strategy, model: nn.Module, runs: Sequence[Run], kept: Sequence[Run] = ()) -> bool:
    """`models.recompute.recompute` for a model on the CPU, held against the model as it was. Collective.

    With `compile` the runs are compiled, and the others that are `kept` too; shards are compiled in their own units.

    Returns:
        Whether some run draws random numbers; False where memory is too small to tell.

    Raises:
        RecipeError: it would train another model, or cannot train.
    """
    name, whole = f"model.name={strategy.recipe.model.name}", observe_whole(strategy, model)
    compiles = strategy.recipe.compile and not (
        strategy.recipe.traits.exchanges == "shards" and strategy.world.size > 1
    )
    recompute(model, runs, compiles=compiles, kept=kept if compiles else ())

    def check(whole: tuple[Passes, int]) -> bool:
        try:
            with _draws([model.get_submodule(name) for run in runs for name in run], strategy.device) as drawn:
                anew = _passes(strategy, model.to(strategy.device), whole[1])
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            in_place = "inplace operation" in str(error)
            why = "changes a block's inputs in place" if in_place else " ".join(text_of(error).split())[:120]
            raise RecipeError(f"{name} {why}, so its blocks cannot be computed anew: use {WITHOUT}") from error
        finally:
            model.to("cpu")
        tolerance = SHARDED_TOLERANCE[strategy.recipe.precision]
        check_equivalent(f"{name} with recompute=true", whole[0], anew, tolerance, FLOOR, WITHOUT)
        return any(drawn)

    draws = strategy.world.all_or_none(lambda: check(whole) if whole else False, DATA_PATIENCE)
    return bool(strategy.world.broadcast_object(draws))


@contextmanager
def _draws(modules: Iterable[nn.Module], device: torch.device) -> Iterator[list[bool]]:
    """Of each pass of each of these modules, whether it draws of torch's generators."""
    found, before = list[bool](), dict[nn.Module, list[torch.Tensor]]()

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def begin(module: nn.Module, *_: Any) -> None:
        before[module] = states()

    def end(module: nn.Module, *_: Any) -> None:
        found.append(not all(map(torch.equal, before[module], states())))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield found


def _passes(strategy: Strategy, model: nn.Module, rows: int, **options: Any) -> Passes:
    def train() -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # on each rank
        model.train()
        hold_statistics(model)

    inputs = strategy.context.example.random(strategy.device, 2 * rows, strategy.recipe.channels_last).split(rows)  # type: ignore[no-untyped-call]
    with torch.compiler.set_stance("force_eager"), _without_races():
        return observe(model, train, lambda piece: strategy.in_precision(model, piece), inputs, **options)


@contextmanager
def _without_races() -> Iterator[None]:
    """Kernels add up in one order, where torch has such: in bf16 the rounding of those that race looks like a fault."""
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


def check_sharded(strategy: Strategy, whole: tuple[Passes, int] | None) -> None:
    """Hold this rank's part of the sharded model against what `observe_whole` saw. Collective.

    Raises:
        RecipeError: they train otherwise, on some rank.
    """
    world, module, parameters = strategy.world, strategy.module, strategy.named_parameters()
    if not (rows := world.broadcast_object(whole[1] if whole else 0)):
        return

    def after(last: bool) -> None:
        if last:
            strategy.reduce_gradients()

    sharded = _passes(strategy, module, rows, after=after, parameters=parameters)
    expected, norm = _own_rows(strategy, whole[0].gradients if whole else {})
    passes = (whole[0] if whole else sharded)._replace(gradients=expected)  # other ranks see no more of the whole
    if strategy.recipe.sync_bn:  # all ranks' rows count: the same variance, but for an unbiased one's divisor
        for layer in training_norms(module):
            for state in (*passes.tensors, *sharded.tensors):
                state.pop(f"buffer {layer}.running_var", None)
    name, tolerance = f"model.name={strategy.recipe.model.name} in shards", SHARDED_TOLERANCE[strategy.recipe.precision]
    world.all_or_none(lambda: check_equivalent(name, passes, sharded, tolerance, FLOOR * norm), DATA_PATIENCE)


def _own_rows(strategy: Strategy, found: Tensors) -> tuple[Tensors, float]:
    """This rank's rows of gradients that rank 0 found, summed over all ranks, and their norm. Collective."""
    world = strategy.world
    kinds = {name: None if gradient is None else gradient.dtype for name, gradient in found.items()}
    norm = get_total_norm([gradient.float() for gradient in found.values() if gradient is not None]).item()
    kinds, norm = world.broadcast_object((kinds, norm))
    expected: Tensors = dict.fromkeys(kinds)
    for (name, kind), piece in zip(kinds.items(), strategy.layout(strategy.named_parameters()).values(), strict=True):
        if kind is not None:
            gradient = found.get(name)
            values = torch.empty(piece.shape, dtype=kind, device=strategy.device) if gradient is None else gradient
            rows = world.broadcast_(values.contiguous()).narrow(0, piece.start, len(piece.local))
            expected[name] = rows.to(strategy.home) * world.size
    return expected, norm * world.size


# --- stages -----------------------------------------------------------------------------------------------------------


def stages_proven(staged: Staged, traced: Traced) -> bool:
    """Hold all blocks in a row against the whole model: on the CPU, for that may not fit a device.

    Returns whether the model draws random numbers; False where memory is too small to tell.

    Raises:
        RecipeError: they train another model, or each pass changes some state, and a step has several.
    """
    name, most = f"model.name={staged.recipe.model.name}", staged.pipe.rows // max(staged.pipe.counts)
    seen = fewest_rows(most, partial(_passes_of_stages, staged, traced), staged.context.say, name)
    staged.deferred.clear()
    if seen is None:
        return False
    whole, cut = seen
    instead = "recompute=false, or mode=ddp" if staged.recipe.recompute else AS_IT_IS
    check_equivalent(f"{name} in stages", whole, cut, TOLERANCE[staged.recipe.precision], instead=instead)
    norms = tuple(f"buffer {layer}." for layer in statistics_layers(staged.model))
    states = [state for state in changing(whole) if not state.startswith(norms)]
    if states and max(staged.pipe.counts) > 1:
        raise RecipeError(
            f"{name}: each pass makes a new {states[0]}, and a step in micro-batches has several passes: use "
            "mode=ddp, or mode=split"
        )
    return draws(whole)


def _passes_of_stages(staged: Staged, traced: Traced, rows: int) -> tuple[Passes, Passes]:
    """Two training passes of the whole model, and of its blocks."""
    sample = staged.context.example.random(torch.device("cpu"), 2 * rows, staged.recipe.channels_last)
    pieces, blocks = torch.split(sample, rows), traced.stages(traced.cuts)
    staged.deferred.clear()
    staged.defer(blocks)

    def in_precision(module: nn.Module, inputs: Tensor) -> Tensor:
        # For fp16 too, which on the CPU may take 200 times as long.
        with torch.autocast("cpu", torch.bfloat16, enabled=staged.recipe.precision in AUTOCAST):
            out: Tensor = module(inputs)
        return out

    def in_blocks(inputs: Tensor) -> Tensor:
        for block in blocks:
            inputs = staged.run_stage(block, inputs, rows, in_precision)
        return inputs

    model, train = staged.model, staged.train_modules
    whole = observe(model, lambda: train([model]), partial(in_precision, model), pieces)
    cut = observe(model, lambda: train(blocks), in_blocks, pieces, after=lambda _: staged.commit_statistics())
    return whole, cut


def held(model: nn.Module, training: bool) -> WeakSet[nn.Module]:
    """Modules that the model's own `train` leaves in the other mode, as that of a frozen part does."""
    with undisturbed([model], torch.device("cpu")):
        model.train(training)
        return WeakSet(module for module in model.modules() if module.training != training)

"""Proof that sharded weights train as the whole model does: that of `models.equivalence`, over ranks.

Rank 0 has the whole model before it is sharded, and makes two passes of it. Then all ranks make the same passes of the
sharded one: each rank's rows of the summed gradients are those of rank 0's whole ones, so many times.
"""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.errors import RecipeError, is_out_of_memory
from trainer.models.blocks import hold_statistics
from trainer.models.equivalence import Passes, check_equivalent, observe
from trainer.models.norms import training_norms
from trainer.modes.base import Strategy
from trainer.processes.world import PATIENCE

TOLERANCE = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # sums over ranks, and kernels of another order
FLOOR = 1e-2  # of the whole model's gradient
TOLD_SECONDS = 2.0  # that it may take without a word


class Whole(NamedTuple):
    """What rank 0 saw of the whole model, and on all ranks with how many rows; none where that was not possible."""

    passes: Passes | None
    rows: int
    seconds: float


def observe_whole(strategy: Strategy, model: nn.Module) -> Whole:
    """Two training passes of the model on rank 0, on its device. Collective."""
    began = time.perf_counter()

    def on_device() -> tuple[Passes | None, int]:
        if not strategy.world.is_main:
            return None, 0
        sizes = sorted({1, 2, strategy.context.example.rows})  # as few rows as the model takes
        for rows in sizes:
            try:
                return _passes(strategy, model.to(strategy.device), rows), rows
            except Exception as error:  # the model's code may raise anything
                if is_out_of_memory(error):
                    break
                if rows == sizes[-1]:
                    raise
            finally:
                model.to("cpu")
        return None, 0

    passes, rows = strategy.world.all_or_none(on_device, PATIENCE)
    rows = strategy.world.broadcast_object(rows)
    if not rows:
        name = strategy.recipe.model.name
        strategy.context.say(f"WARNING: model.name={name} does not fit this device, to compare it with the sharded one")
    return Whole(passes, rows, time.perf_counter() - began)


def _passes(strategy: Strategy, model: nn.Module, rows: int, **options: Any) -> Passes:
    def train() -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # on each rank
        model.train()
        hold_statistics(model)

    inputs = strategy.context.example.random(strategy.device, 2 * rows, strategy.recipe.channels_last)
    with torch.compiler.set_stance("force_eager"):
        return observe(
            model, train, lambda piece: strategy.in_precision(model, piece), torch.split(inputs, rows), **options
        )


def check_sharded(strategy: Strategy, whole: Whole) -> None:
    """Hold this rank's part of the sharded model against what `observe_whole` saw. Collective.

    Raises:
        RecipeError: they train otherwise, on some rank.
    """
    if not whole.rows:
        return
    began, world, module = time.perf_counter(), strategy.world, strategy.module
    parameters = strategy.named_parameters()

    def after(last: bool) -> None:
        if last:
            strategy.reduce_gradients()

    sharded = _passes(strategy, module, whole.rows, after=after, parameters=parameters)
    passes, norm = _own_rows(strategy, whole.passes, sharded)
    if strategy.recipe.sync_bn:  # all ranks' rows count: the same variance, but for an unbiased one's divisor
        for layer in training_norms(module):
            for state in (*passes.tensors, *sharded.tensors):
                state.pop(f"buffer {layer}.running_var", None)
    error = None
    try:
        name = f"model.name={strategy.recipe.model.name} in shards"
        check_equivalent(name, passes, sharded, TOLERANCE[strategy.recipe.precision], FLOOR * norm)
    except RecipeError as caught:
        error = caught
    world.raise_any(error)
    seconds = whole.seconds + time.perf_counter() - began
    if seconds > TOLD_SECONDS:
        strategy.context.say(f"fsdp: {seconds:.1f} s to compare the sharded model with the whole one")


def _own_rows(strategy: Strategy, whole: Passes | None, sharded: Passes) -> tuple[Passes, float]:
    """Rank 0's passes with this rank's rows of its gradients, summed over all ranks, and these gradients' norm.

    Another rank has only the gradients of them, and takes its own for the rest. Collective.
    """
    world, found = strategy.world, {} if whole is None else whole.gradients
    kinds = {name: None if gradient is None else gradient.dtype for name, gradient in found.items()}
    norm = get_total_norm([gradient.float() for gradient in found.values() if gradient is not None]).item()
    kinds, norm = world.broadcast_object((kinds, norm))
    expected: dict[str, Tensor | None] = dict.fromkeys(kinds)
    for (name, kind), piece in zip(kinds.items(), strategy.layout(strategy.named_parameters()).values(), strict=True):
        if kind is not None:
            gradient = found.get(name)
            values = torch.empty(piece.shape, dtype=kind, device=strategy.device) if gradient is None else gradient
            rows = world.broadcast_(values.contiguous()).narrow(0, piece.start, len(piece.local))
            expected[name] = rows.to(strategy.home) * world.size
    return (whole or sharded)._replace(gradients=expected), norm * world.size

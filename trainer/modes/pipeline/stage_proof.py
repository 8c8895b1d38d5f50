"""Proof that a model in stages trains as the whole one does: that of `models.equivalence`, before it is placed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trainer.devices.precision import AUTOCAST
from trainer.errors import RecipeError
from trainer.models.equivalence import (
    AS_IT_IS,
    TOLERANCE,
    Passes,
    changing,
    check_equivalent,
    draws,
    fewest_rows,
    observe,
)
from trainer.models.norms import statistics_layers
from trainer.models.partition import Traced
from trainer.models.undisturbed import undisturbed

if TYPE_CHECKING:
    from trainer.modes.pipeline.stages import Staged


def prove(staged: Staged, traced: Traced) -> bool:
    """Hold all blocks in a row against the whole model: on the CPU, for that may not fit a device.

    Returns whether the model draws random numbers; False where memory is too small to tell.

    Raises:
        RecipeError: they train another model, or each pass changes some state, and a step has several.
    """
    name, most = f"model.name={staged.recipe.model.name}", staged.pipe.rows // max(staged.pipe.counts)
    seen = fewest_rows(most, partial(_passes, staged, traced), staged.context.say, name)
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


def _passes(staged: Staged, traced: Traced, rows: int) -> tuple[Passes, Passes]:
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

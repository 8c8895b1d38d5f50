"""Checks that a mode computes what `single` computes: compares their first losses, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer.commands.compare.entries import Entry
from trainer.errors import TrainerError
from trainer.recipe import Recipe, changed_keys
from trainer.recipe.image_sizes import typed_size
from trainer.recipe.known_names import DATASETS

# Relative, of a step's loss. Half precision rounds, and a run's rounding grows with every step.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 1e-3, "bf16": 1e-2}  # what is trained in tf32 is checked in fp32
# Other kernels add in another order, and a large learning rate makes much of it: on GPUs so many times what rounding
# alone makes of single's losses is allowed too, but never more than this.
TIMES, MOST = 4.0, 1e-2
# Where layers see other parts of a batch losses may differ much (batch norm over 4 digits: by 74 % within 20 steps),
# and nothing is proved by it; but a mode that learns has not twice the loss.
LOOSE = 2.0
# Keys that change no result, beside those that a continued run may change.
SAME_MATHS = {"channels_last", "compile", "sync_bn", "deterministic"}
UNCHECKED = "no single to compare"


@dataclass(frozen=True)
class Exactness:
    """What was found."""

    # "reference", "exact", "differs" (as it may, for the reason in text), "disagrees", "other maths", "not compared"
    verdict: str
    text: str  # the table's words
    deviation: float | None = None  # the largest relative difference of a loss, where losses were compared


def exactness_of(
    entry: Entry,
    losses: Sequence[float],
    reference: Entry | None,
    expected: Sequence[float],
    parts: Sequence[str],
    rounded: Sequence[float] = (),
) -> Exactness:
    """Hold an entry's losses against those of the reference.

    Args:
        losses, expected: one a step, from the first; the entry's and single's.
        parts: what in the model makes modes differ (`batch_dependent`).
        rounded: single's once more, added in another order; empty where that was not measured.
    """
    if entry == reference:
        return Exactness("reference", "reference")
    if not entry.recipe.traits.same_maths:
        return Exactness("other maths", "not same maths")
    if not losses:
        return Exactness("not compared", "-")
    if reference is None or not expected:
        return Exactness("not compared", UNCHECKED)
    changed = changed_keys(reference.recipe, entry.recipe).keys() - SAME_MATHS
    if changed:
        return Exactness("not compared", f"other {', '.join(sorted(changed))}")
    pairs = list(zip(losses, expected, strict=False))
    deviation, scatter = _deviation(losses, expected), _deviation(rounded, expected)
    if deviation <= max(TOLERANCE[entry.recipe.precision], min(TIMES * scatter, MOST)):
        return Exactness("exact", "exact", deviation)
    mine, theirs = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    if parts and mine <= LOOSE * theirs:
        return Exactness("differs", f"{parts[0]}: {deviation:.1%}", deviation)
    return Exactness("disagrees", f"DISAGREES by {deviation:.1%}", deviation)


def _deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    pairs = zip(losses, expected, strict=False)
    deviations = (abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) else math.inf for a, b in pairs)
    return max(deviations, default=0.0)


def batch_dependent(recipe: Recipe) -> list[str]:
    """What in the model depends on how a batch is divided: "batch norm", "dropout". Builds it on shapes alone."""
    import torch
    from torch import nn
    from torchvision.ops import StochasticDepth

    from trainer.commands.plan.dataset_facts import DatasetFacts, dataset_facts

    layers: set[str] = set()
    with suppress(TrainerError, RuntimeError, NotImplementedError):
        if recipe.data.name in DATASETS:  # which need not be here, or counted, for this
            shape = recipe.data.channels or 3, typed_size(recipe.data.image_size) or 224
            facts = DatasetFacts(None, None, recipe.model.num_classes or 10, *shape, "")
        else:
            facts = dataset_facts(recipe)
        with torch.device("meta"):
            model = facts.model(recipe, starting=False)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                layers.add("batch norm")
            dropped = isinstance(module, nn.modules.dropout._DropoutNd | StochasticDepth) and module.p > 0
            if dropped or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0):
                layers.add("dropout")
    return sorted(layers)

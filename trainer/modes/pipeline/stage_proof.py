"""Comparison of the stages with the whole model, before the stages move to their devices."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.devices.precision import AUTOCAST
from trainer.errors import RecipeError
from trainer.models.blocks import refreeze
from trainer.models.equivalence import (
    AS_IT_IS,
    TOLERANCE,
    Passes,
    check_equivalent,
    draws_random_numbers,
    list_changing_state,
    observe,
    try_fewest_rows,
)
from trainer.models.norms import list_statistics_layers
from trainer.models.partition import Traced
from trainer.models.undisturbed import restore_after
from trainer.modes.pipeline.local_stages import LocalStages


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records the storages of all tensors that are arguments of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self.storages.add(value.untyped_storage()._cdata)
        return function(*args, **(kwargs or {}))


def find_users(
    model_name: str,
    model: nn.Module,
    traced: Traced,
    blocks: Sequence[nn.Module],
    trackers: Sequence[StorageTracker],
) -> None:
    """Find tensors that only a hook or closure uses, and add their blocks to `traced.users`.

    The model's graph does not show these uses, so `traced` assigns such a tensor to the last block.

    Args:
        model_name: value of `model.name`, for the error.
        model: the whole model.
        traced: the graph of the model.
        blocks: the blocks that the model is cut into.
        trackers: the storages that each block used in its passes.

    Raises:
        RecipeError: a block uses a tensor that belongs to another block, and either several blocks
            use the tensor or it does not belong to the last block.
    """
    owned = []
    for block in blocks:
        tensors = [*block.parameters(), *block.buffers()]
        owned.append({tensor.untyped_storage()._cdata for tensor in tensors})
    for name, tensor in model.state_dict(keep_vars=True).items():
        storage = tensor.untyped_storage()._cdata
        users = [index for index, used in enumerate(trackers) if storage in used.storages]
        if all(storage in owned[index] for index in users):
            continue
        owners = [index for index, storages in enumerate(owned) if storage in storages]
        if len(users) > 1 or owners != [len(blocks) - 1]:
            raise RecipeError(
                f"model.name={model_name} uses {name} in several blocks, one of "
                "them by a hook or a closure, so it cannot be cut into stages between them: use "
                f"{AS_IT_IS}"
            )
        traced.users[name] = users[0]


def check_stages(
    stages: LocalStages,
    model: nn.Module,
    traced: Traced,
) -> bool:
    """Check that the model's blocks, run one after another, train as the whole model does.

    The comparison runs on the CPU, because the whole model may not fit on a device.

    Args:
        stages: the mode, which runs the blocks.
        model: the whole model, on the CPU.
        traced: the graph of the model. The function adds entries to `traced.users`.

    Returns:
        True if the model draws random numbers. False if it does not, or if the CPU's memory is too
        small for the comparison.

    Raises:
        RecipeError: the blocks do not train as the model does, or each pass changes some state and
            a step has several passes.
    """
    name = f"model.name={stages.recipe.model.name}"
    most = stages.pipe.rows // max(stages.pipe.counts)
    observe_both = partial(_observe_stages, stages, model, traced)
    passes = try_fewest_rows(most, observe_both, stages.context.say, name)
    if passes is None:
        return False
    whole, cut = passes
    if stages.recipe.recompute:
        instead = "recompute=false, or mode=ddp"
    else:
        instead = AS_IT_IS
    tolerance = TOLERANCE[stages.recipe.precision]
    check_equivalent(f"{name} in stages", whole, cut, tolerance, instead=instead)
    norms = tuple(f"buffer {layer}." for layer in list_statistics_layers(model))
    states = [state for state in list_changing_state(whole) if not state.startswith(norms)]
    if states and max(stages.pipe.counts) > 1:
        raise RecipeError(
            f"{name}: each pass makes a new {states[0]}, and a step in micro-batches has several "
            "passes: use mode=ddp, or mode=split"
        )
    return draws_random_numbers(whole)


def _observe_stages(
    stages: LocalStages,
    model: nn.Module,
    traced: Traced,
    rows: int,
) -> tuple[Passes, Passes]:
    """Run two training passes of the whole model and two of its blocks, and observe them.

    The blocks' passes also show which tensors a hook or closure uses: see `find_users`, which adds
    them to `traced.users`.

    Returns:
        (whole, cut): the passes of the whole model, and those of its blocks.
    """
    sample = stages.context.example.batch(
        torch.device("cpu"),
        2 * rows,
        stages.recipe.channels_last,
    )
    batches = torch.split(sample.inputs, rows)
    blocks = traced.stages(traced.cuts)
    stages.deferred.clear()
    stages.defer(blocks)

    def in_precision(module: nn.Module, inputs: Tensor) -> Tensor:
        # bf16 replaces fp16 here, because fp16 may take 200 times as long on a CPU.
        with torch.autocast("cpu", torch.bfloat16, enabled=stages.recipe.precision in AUTOCAST):
            out: Tensor = module(inputs)
        return out

    trackers = [StorageTracker() for _ in blocks]

    def run_blocks(inputs: Tensor) -> Tensor:
        for block, tracker in zip(blocks, trackers, strict=True):
            with tracker:
                inputs = stages.run_stage(block, inputs, rows, in_precision)
        return inputs

    def train_whole() -> None:
        # The model may define its own `train`, which its stages do not have.
        model.train()
        refreeze(model)

    whole = observe(model, train_whole, partial(in_precision, model), batches)
    cut = observe(
        model,
        partial(stages.train_modules, blocks),
        run_blocks,
        batches,
        after=lambda _: stages.commit_statistics(),
        evaluate=partial(stages.train_modules, blocks, training=False),
    )
    find_users(stages.recipe.model.name, model, traced, blocks, trackers)
    return whole, cut


def find_exceptions(model: nn.Module, training: bool) -> WeakSet[nn.Module]:
    """Find modules that keep the opposite mode after the model's own `train(training)`.

    A model may keep a frozen part in evaluation, for example.
    """
    with restore_after([model]):
        model.train(training)
        return WeakSet(module for module in model.modules() if module.training != training)

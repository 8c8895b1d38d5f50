"""Memory for compute: activations inside of a model's blocks are computed anew in the backward pass, not kept for it.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), by torch's
`checkpoint`. Random numbers are those of the forward pass, and running statistics count a batch once. Parameters keep
their names: what is wrapped is a block's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainer.models.blocks import blocks

COUNT = "num_batches_tracked"
WITHOUT = "recompute=false, or accumulate=2 to save memory"
Run = tuple[str, ...]  # names of modules that are computed anew together


def runs_of(model: nn.Module) -> list[Run]:
    """What is computed anew, in the order of the model: a block that has layers of its own, or in a plain
    `nn.Sequential` a convolution or linear layer with what follows it up to the next."""
    found: dict[Run, None] = {}
    for name in (block.name for block in blocks(model)):
        parent = name.rpartition(".")[0]
        if type(model.get_submodule(parent)) is nn.Sequential and name:
            found |= dict.fromkeys(_runs_in(model.get_submodule(parent), f"{parent}." if parent else ""))
        elif _is_composite(model.get_submodule(name)) and name:
            found[(name,)] = None
    return [*found]


def _is_composite(module: nn.Module) -> bool:
    """Whether a module is called and has more than one operation, as far as one can tell."""
    called = type(module).forward is not nn.Module.forward and type(module) is not nn.Sequential
    return called and (any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn."))


def _runs_in(sequential: nn.Module, prefix: str) -> Iterator[Run]:
    run: list[str] = []
    matrices = 0  # in this run
    for name, child in [*sequential.named_children(), ("", None)]:
        matrix = child is not None and any(p.ndim > 1 for p in child.parameters())
        apart = child is None or type(child) is nn.Sequential or (matrix and _is_composite(child))
        if apart or (matrix and matrices):
            if len(run) > 1:
                yield tuple(run)
            run, matrices = [], 0
        if not apart and (run or not getattr(child, "inplace", False)):  # a run's own input stays as it is
            run.append(prefix + name)
            matrices += matrix
        elif apart and child is not None and type(child) is not nn.Sequential:
            yield (prefix + name,)


def recompute(model: nn.Module, runs: Iterable[Run], random: bool = True) -> None:
    """Let a model, or a copy of one in which that was done, compute these anew in each backward pass.

    `random`: with the random numbers of the forward pass; shapes alone need none.
    """
    in_rows: dict[str, list[Run]] = {}
    for first, *more in runs:
        if more:
            in_rows.setdefault(first.rpartition(".")[0], []).append((first, *more))
            continue
        block = model.get_submodule(first)
        if hasattr(vars(block).get("forward"), "anew"):  # of the model that this is a copy of
            del block.forward
        block.forward = anew(block.forward, [block], random)
    for name, together in in_rows.items():
        holder = model.get_submodule(name)
        holder.forward = _in_runs(model, holder, together, random)


def _in_runs(model: nn.Module, sequential: nn.Module, runs: Sequence[Run], random: bool) -> Callable[[Any], Any]:
    """The `forward` of a plain `nn.Sequential` of which some parts are computed anew together."""
    starts = {model.get_submodule(run[0]): [model.get_submodule(name) for name in run] for run in runs}
    inside = {module for run in starts.values() for module in run[1:]}
    parts = [
        anew(_row(starts[module]), starts[module], random) if module in starts else module
        for module in sequential.children()
        if module not in inside
    ]
    return _row(parts)


def _row(parts: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda inputs: reduce(lambda value, part: part(value), parts, inputs)


def anew(forward: Callable[..., Any], modules: Sequence[nn.Module], random: bool = True) -> Callable[..., Any]:
    """`forward`, which runs `modules`, with its activations computed anew in the backward pass."""
    norms = [layer for module in modules for layer in module.modules() if isinstance(layer, _NormBase)]

    def contexts() -> Any:
        return nullcontext(), _uncounted(norms)

    def forward_anew(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Stopping early raises through C++, and on a GPU torch 2.11 lost that exception.
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=random,
            context_fn=contexts,
            early_stop=False,
            **kwargs,
        )

    forward_anew.anew = True  # type: ignore[attr-defined]
    return forward_anew


@contextmanager
def _uncounted(norms: Sequence[_NormBase]) -> Iterator[None]:
    """A second pass over the same batch leaves running statistics as they are."""
    training = [(layer, layer.momentum, layer._buffers.get(COUNT)) for layer in norms if layer.training]
    try:
        for layer, _, _ in training:
            vars(layer)["momentum"], layer._buffers[COUNT] = 0.0, None
        yield
    finally:
        for layer, momentum, count in training:
            vars(layer)["momentum"], layer._buffers[COUNT] = momentum, count

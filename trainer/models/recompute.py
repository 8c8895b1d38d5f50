"""Memory for compute: activations inside of a model's blocks are computed anew in the backward pass, not kept for it.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), by torch's
`checkpoint`. Random numbers are those of the forward pass, and running statistics count a batch once. Parameters keep
their names: what is wrapped is a block's `forward`. What is compiled lies inside of what is computed anew, as in
torchtitan: compiled code draws random numbers of its own, and with `checkpoint` around it draws the same ones twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from trainer.devices import cuda_graphs
from trainer.models.blocks import blocks

WITHOUT = "recompute=false, or accumulate=2 to save memory"
Run = tuple[str, ...]  # names of modules that are computed anew together
Forward = Callable[..., Any]


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


def recompute(
    model: nn.Module, runs: Iterable[Run], random: bool = True, compiles: bool = False, kept: Sequence[Run] = ()
) -> None:
    """Let a model, or a copy of one in which that was done, compute these anew in each backward pass.

    Args:
        random: with the random numbers of the forward pass; shapes alone need none.
        compiles: compile each of them, and the others that are `kept`.
    """
    in_rows: dict[str, dict[Run, Forward]] = {}

    def changed(run: Run, forward: Forward) -> Forward:
        forward = compiled(forward, run[0]) if compiles else forward
        return forward if run in kept else anew(forward, [model.get_submodule(name) for name in run], random)

    for run in (*runs, *kept):
        if len(run) > 1:
            row = _row([model.get_submodule(name) for name in run])
            in_rows.setdefault(run[0].rpartition(".")[0], {})[run] = changed(run, row)
            continue
        block = model.get_submodule(run[0])
        if hasattr(vars(block).get("forward"), "anew"):  # of the model that this is a copy of
            del block.forward
        block.forward = changed(run, block.forward)
    for name, together in in_rows.items():
        starts = {model.get_submodule(run[0]): forward for run, forward in together.items()}
        inside = {model.get_submodule(name) for run in together for name in run[1:]}
        holder = model.get_submodule(name)
        holder.forward = _row([starts.get(part, part) for part in holder.children() if part not in inside])


def _row(parts: Sequence[Forward]) -> Forward:
    """The `forward` of a plain `nn.Sequential` of these."""

    def forward(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return forward


def compiled(forward: Forward, name: str) -> Forward:
    """`forward`, compiled by itself.

    It has code and a name of its own: where torch's tracer meets the same code with other shapes, it takes them for
    dynamic ones, and gives up at the ninth.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"forward_{name}")
    of_it: Forward = torch.compile(run)
    return of_it


def anew(forward: Forward, modules: Sequence[nn.Module], random: bool = True) -> Forward:
    """`forward`, which runs `modules`, with its activations computed anew in the backward pass."""
    norms = [layer for module in modules for layer in module.modules() if isinstance(layer, _NormBase)]

    def contexts() -> Any:
        return nullcontext(), _uncounted(norms)

    def forward_anew(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # For the second pass lists are as they are now: one that collects outputs, as a DenseNet's, grows.
        first, (args, kwargs) = [(args, kwargs)], tree_map(lambda value: value, (args, kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = first.pop() if first else (args, kwargs)
            return forward(*args, **kwargs)

        # Stopping early raises through C++, and on a GPU torch 2.11 lost that exception. Random states cannot be put
        # back in a recording, whose proof finds blocks that draw.
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=random and not cuda_graphs.recording,
            context_fn=contexts,
            early_stop=False,
            **kwargs,
        )

    forward_anew.anew = forward  # type: ignore[attr-defined]
    return forward_anew


@contextmanager
def _uncounted(norms: Sequence[_NormBase]) -> Iterator[None]:
    """A second pass over the same batch leaves running statistics as they are, and changes copies of them.

    Nothing else is other than in the first pass: a layer whose momentum is another would be compiled again.
    """
    before = [(layer, {**layer._buffers}) for layer in norms if layer.training]
    try:
        for layer, buffers in before:
            layer._buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for layer, buffers in before:
            layer._buffers.update(buffers)

"""Activation checkpointing: the backward pass computes the activations of a block again.

Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
The implementation uses torch's `checkpoint`. The second computation draws the same random numbers
as the first, and running statistics count a batch once. Parameters keep their names, because only
the `forward` of a block is wrapped. Compiled code is inside the checkpoint, as in torchtitan:
the random numbers that it draws are then the same in both computations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import host_random_states, set_host_random_states
from trainer.models.blocks import list_blocks
from trainer.models.reachable import is_own

ALTERNATIVE = "recompute=false, or accumulate=2 to save memory"
# Names of modules that are recomputed together.
Run = tuple[str, ...]
Forward = Callable[..., Any]


def list_runs(model: nn.Module) -> list[Run]:
    """List the parts of a model that can be recomputed, in the order of the model.

    A part is a block that contains layers. In a plain `nn.Sequential`, it is a convolution or
    linear layer with the layers that follow it, up to the next convolution or linear layer.
    """
    runs = {}
    for block in list_blocks(model):
        if not block.name:
            continue
        parent_name = block.name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
        if type(parent) is nn.Sequential:
            prefix = f"{parent_name}." if parent_name else ""
            runs.update(dict.fromkeys(_split_sequential(parent, prefix)))
        elif _is_composite(model.get_submodule(block.name)):
            runs[(block.name,)] = None
    return [*runs]


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module is called and seems to run several operations."""
    # The forward of a scripted module cannot be wrapped.
    if isinstance(module, torch.jit.ScriptModule):
        return False
    # Containers such as `nn.ModuleList` are not called, and `nn.Sequential` is split.
    if type(module).forward is nn.Module.forward or type(module) is nn.Sequential:
        return False
    has_children = next(module.children(), None) is not None
    return has_children or not type(module).__module__.startswith("torch.nn.")


def _split_sequential(
    sequential: nn.Module,
    prefix: str,
) -> Iterator[Run]:
    run: list[str] = []
    has_matrix_in_run = False
    # The last entry, None, completes the last run.
    for name, child in [*sequential.named_children(), ("", None)]:
        has_matrix = child is not None and any(p.ndim > 1 for p in child.parameters())
        is_apart = (
            child is None or type(child) is nn.Sequential or (has_matrix and _is_composite(child))
        )
        if is_apart or (has_matrix and has_matrix_in_run):
            if len(run) > 1:
                yield tuple(run)
            run = []
            has_matrix_in_run = False
        if is_apart:
            if child is not None and type(child) is not nn.Sequential:
                yield (prefix + name,)
        # A run must not change its input in place, because the second computation reads the input.
        # Therefore no run starts with an in-place layer.
        elif run or not getattr(child, "inplace", False):
            run.append(prefix + name)
            has_matrix_in_run = has_matrix_in_run or has_matrix


def recompute(
    model: nn.Module,
    runs: Iterable[Run],
    random: bool = True,
    compiles: bool = False,
    kept: Sequence[Run] = (),
) -> None:
    """Wrap parts of a model so that each backward pass computes their activations again.

    Args:
        model: The model, which is changed in place. It may be a copy of a wrapped model.
        runs: The parts to wrap, from `list_runs`.
        random: Whether the second computation must draw the same random numbers as the first.
        compiles: Whether to compile each part of `runs` and `kept`.
        kept: Parts that keep their activations.
    """
    # For each sequential, the callables that replace a child. The first of a run is replaced by the
    # whole run, and the others by nothing.
    by_sequential: dict[str, dict[nn.Module, list[Forward]]] = {}

    def wrap(run: Run, forward: Forward) -> Forward:
        if compiles:
            forward = compile_call(forward, run[0])
        if run in kept:
            return forward
        return checkpoint_forward(forward, [model.get_submodule(name) for name in run], random)

    for run in (*runs, *kept):
        if len(run) > 1:
            layers = [model.get_submodule(name) for name in run]
            parent = run[0].rpartition(".")[0]
            replacements = by_sequential.setdefault(parent, {})
            replacements |= {layer: [] for layer in layers}
            replacements[layers[0]] = [wrap(run, _chain(layers))]
            continue
        block = model.get_submodule(run[0])
        # A copy of a wrapped model has the wrapped `forward` of the original, which would compute
        # with the original's weights. Remove it to wrap the `forward` of the class.
        if hasattr(vars(block).get("forward"), "anew"):
            del block.forward
        block.forward = wrap(run, block.forward)
    for parent, replacements in by_sequential.items():
        sequential = model.get_submodule(parent)
        parts = []
        for child in sequential.children():
            parts += replacements.get(child, [child])
        sequential.forward = _chain(parts)


def _chain(parts: Sequence[Forward]) -> Forward:
    """Return the `forward` of a plain `nn.Sequential` of `parts`."""

    def forward(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return forward


def compile_call(forward: Forward, name: str) -> Forward:
    """Compile a block's `forward` separately from the rest of the model.

    Each compiled function has its own code object and name. If all blocks shared one code object,
    torch's tracer would see it with the shapes of all blocks. It would mark the shapes as dynamic,
    and give up at the ninth shape.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"forward_{name}")
    return torch.compile(run)


def checkpoint_forward(
    forward: Forward,
    modules: Sequence[nn.Module],
    random: bool = True,
) -> Forward:
    """Wrap a `forward` so that the backward pass runs it again instead of keeping activations.

    Args:
        forward: The function to wrap.
        modules: The modules that `forward` runs.
        random: Whether the second computation must draw the same random numbers as the first.
    """
    layers: list[nn.Module] = []
    for module in modules:
        layers += module.modules()
    norms = [layer for layer in layers if isinstance(layer, _NormBase)]
    # torch restores only its own random states. Reading those of Python and NumPy takes 0.1 ms, so
    # it is skipped for layers of libraries, which draw from neither.
    draws_on_host = random and any(map(_may_draw_on_host, layers))

    def forward_anew(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The second computation gets copies of lists in the arguments, because a list that collects
        # outputs, as in a DenseNet, grows after this call.
        first_arguments = [(args, kwargs)]
        args, kwargs = tree_map(lambda value: value, (args, kwargs))
        states = host_random_states() if draws_on_host else None

        def run(*args: Any, **kwargs: Any) -> Any:
            if first_arguments:
                args, kwargs = first_arguments.pop()
                return forward(*args, **kwargs)
            # From the second call on, `run` recomputes, once for each backward pass through the
            # block. A model that computes gradients in its own `forward` has two backward passes.
            with _keep_statistics(norms), ExitStack() as stack:
                if states is not None:
                    stack.callback(set_host_random_states, *host_random_states())
                    set_host_random_states(*states)
                return forward(*args, **kwargs)

        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            # Random states cannot be restored during a CUDA graph capture. The check before a
            # capture finds blocks that draw random numbers.
            preserve_rng_state=random and not cuda_graphs.is_capturing,
            # Stopping early raises an exception through C++, which torch 2.11 loses on a GPU.
            early_stop=False,
            **kwargs,
        )

    forward_anew.anew = forward  # type: ignore[attr-defined]
    return forward_anew


def _may_draw_on_host(layer: nn.Module) -> bool:
    has_hooks = bool(layer._forward_hooks or layer._forward_pre_hooks)
    return has_hooks or is_own(type(layer)) or "forward" in vars(layer)


@contextmanager
def _keep_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Let a second pass over the same batch update copies of the running statistics.

    The statistics themselves then count the batch once. A momentum of 0 would have the same effect,
    but would cause compiled layers to be recompiled.
    """
    originals = [(layer, {**layer._buffers}) for layer in norms if layer.training]
    try:
        for layer, buffers in originals:
            for name, buffer in buffers.items():
                if buffer is not None:
                    layer._buffers[name] = buffer.clone()
        yield
    finally:
        for layer, buffers in originals:
            layer._buffers.update(buffers)

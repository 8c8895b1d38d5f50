"""Batch normalisation and its subclasses: which of them a mode may replace, by running them on samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from trainer.errors import RecipeError
from trainer.models.blocks import keeps_statistics
from trainer.models.undisturbed import undisturbed

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormCalls(TorchFunctionMode):
    """Replaces `torch.nn.functional.batch_norm` in this context, whichever layer calls it."""

    def __init__(self, instead: Callable[..., Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (self._instead if function is batch_norm else function)(*args, **(kwargs or {}))


def statistics_layers(model: nn.Module) -> dict[str, _NormBase]:
    """Normalisation that has running statistics and is not frozen, each layer once, by its first name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and not keeps_statistics(layer)
    }


def training_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Batch normalisation that uses the batch's statistics in training, each layer once, by its first name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not keeps_statistics(layer)
    }


def check_alone(model: nn.Module, exchanges: str = "nothing") -> None:
    """Refuse layers that communicate with other ranks, which may be at another layer, or that no rank has whole."""
    for name, layer in model.named_modules():
        tracks = isinstance(layer, _InstanceNorm) and layer.running_mean is not None and not keeps_statistics(layer)
        if tracks and exchanges in ("gradients", "shards"):
            raise RecipeError(
                f"layer {name or 'the model itself'} ({type(layer).__name__}) would keep statistics of rank 0's images "
                "alone: make it track_running_stats=False, or type mode=single"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise RecipeError(
                f"layer {name or 'the model itself'} ({type(layer).__name__}) exchanges its statistics with ranks that "
                "may be at another layer: make it nn.BatchNorm2d, and type sync_bn=true, which is for mode=ddp"
            )


def unlike(layers: Mapping[str, nn.Module], known: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The layers for which `known` is false; it is called once for each kind."""
    answers: dict[Any, bool] = {}

    def answer(layer: nn.Module) -> bool:
        options = [value for key, value in vars(layer).items() if key != "num_features" and not isinstance(value, dict)]
        kind = type(layer), repr(options), *map(type, layer.children())
        if kind not in answers:
            answers[kind] = known(layer)
        return answers[kind]

    return {name: layer for name, layer in layers.items() if not answer(layer)}


def acts_as_batch_norm(layer: nn.Module) -> bool:
    """Whether a layer is `nn.BatchNorm2d` or the like, with whatever it adds to the result, an activation or dropout:
    rows meet in one call of `torch.nn.functional.batch_norm` alone, outputs in training do not depend on the running
    statistics, and those move to the batch's by its momentum."""
    if type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer):
        return True
    if not isinstance(layer, _BatchNorm):
        return False
    calls: list[bool] = []

    def counted(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["training"] if "training" in kwargs else args[4])
        return batch_norm(inputs, *args, **kwargs)

    try:
        with undisturbed([layer], torch.device("cpu")):
            if not layer.train().training:  # it always is in evaluation mode
                return True
        for inputs in _samples(layer):
            calls.clear()
            with BatchNormCalls(counted):
                _run(layer, inputs, 1.0, 0.0)
            return calls == [True] and (layer.running_mean is None or _writes_only(layer, inputs))
    except Exception:  # the user's code may raise anything
        return False
    return False


def _samples(layer: Any) -> Iterator[Tensor]:
    """Inputs of as many dimensions as the layer takes, in its precision."""
    kind = next((tensor.dtype for tensor in (layer.weight, layer.running_mean) if tensor is not None), torch.float32)
    for sides in (2, 0, 1, 3):
        shape = (6, layer.num_features, *[3] * sides)
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=kind) + 2
        with suppress(ValueError, RuntimeError, AssertionError):
            _run(layer, inputs, 1.0, 0.0)
            yield inputs


def _run(layer: Any, inputs: Tensor, momentum: float, start: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs in training, and buffers afterwards, of a layer whose running statistics were `start`.

    The layer is restored. It is not copied: a `forward` that was assigned to it may refer to it.
    """
    before = layer.momentum
    try:
        with undisturbed([layer], inputs.device), torch.no_grad():
            layer.train().momentum = momentum
            for name in STATISTICS:
                if getattr(layer, name, None) is not None:
                    getattr(layer, name).fill_(start)
            torch.manual_seed(0)
            out = layer.forward(inputs.clone())
            return out, {name: buffer.clone() for name, buffer in layer.named_buffers()}
    finally:
        layer.momentum = before


def _writes_only(layer: _BatchNorm, inputs: Tensor) -> bool:
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    outputs = []
    for momentum, start in ((1.0, 5e5), (0.25, 3.0)):
        out, after = _run(layer, inputs, momentum, start)
        outputs.append(out)
        expected = {"running_mean": inputs.mean(axes), "running_var": inputs.var(axes)}
        expected = {name: torch.full_like(value, start).lerp(value, momentum) for name, value in expected.items()}
        for name, buffer in layer.named_buffers():
            if name == "num_batches_tracked":
                if after[name] != start + 1:
                    return False
            elif not torch.allclose(after[name], expected.get(name, buffer), rtol=1e-4, atol=1e-4):
                return False
    return torch.equal(*outputs)


def values_a_row(model: nn.Module, inputs: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, list[int]]:
    """How many values of a channel each layer gets of one row of `inputs` (N, ...), for each call."""
    seen: dict[str, list[int]] = {name: [] for name in layers}

    def note(name: str) -> Callable[..., None]:
        return lambda layer, args, out: seen[name].append(out.numel() // (layer.num_features * len(inputs)))

    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        with undisturbed([model], inputs.device), torch.no_grad():
            model.eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen

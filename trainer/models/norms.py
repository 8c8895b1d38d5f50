"""Find normalization layers, and check whether a layer computes batch normalization."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from trainer.errors import RecipeError
from trainer.models.blocks import keeps_statistics
from trainer.models.undisturbed import is_plain, restore_after

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormCalls(TorchFunctionMode):
    """Context in which `instead` replaces `torch.nn.functional.batch_norm`."""

    def __init__(self, instead: Callable[..., Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is batch_norm:
            function = self._instead
        return function(*args, **(kwargs or {}))


def list_statistics_layers(model: nn.Module) -> dict[str, _NormBase]:
    """Return the normalization layers with running statistics that are not frozen.

    The keys are names in the model. A layer with several names is listed under the first one.
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _NormBase) and _tracks_statistics(layer)
    }


def _tracks_statistics(layer: _NormBase) -> bool:
    return layer.running_mean is not None and not keeps_statistics(layer)


def buffers_besides_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a pass can write, except those of `list_statistics_layers`."""
    prefixes = tuple(f"{layer}." for layer in list_statistics_layers(model))
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if is_plain(buffer) and not name.startswith(prefixes)
    }


def list_training_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch normalization layers that use the statistics of the batch in training.

    The keys are names in the model. A layer with several names is listed under the first one.
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not keeps_statistics(layer)
    }


def check_alone(model: nn.Module, exchanges: str = "nothing") -> None:
    """Check for layers that would hang, or would have wrong running statistics, on several ranks.

    SyncBatchNorm would hang, because the ranks that it waits for may be at a different layer. If
    ranks exchange gradients or shards, InstanceNorm would keep the statistics of rank 0's images
    alone.

    Args:
        model: The model.
        exchanges: Data that the mode exchanges between ranks, see `Traits.exchanges`.

    Raises:
        RecipeError: The model has such a layer.
    """
    for name, layer in model.named_modules():
        label = f"layer {name or 'the model itself'} ({type(layer).__name__})"
        if (
            exchanges in ("gradients", "shards")
            and isinstance(layer, _InstanceNorm)
            and _tracks_statistics(layer)
        ):
            raise RecipeError(
                f"{label} would keep statistics of rank 0's images alone: make it "
                "track_running_stats=False, or type mode=single"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise RecipeError(
                f"{label} exchanges its statistics with ranks that may be at another layer: make "
                "it nn.BatchNorm2d, and type sync_bn=true, which is for mode=ddp"
            )


def select_unlike_batch_norm(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers for which `acts_as_batch_norm` is False.

    It is called for one layer of each kind. Layers of one kind have the same class, the same
    attributes except `num_features` and dictionaries, and children of the same classes.
    """
    answers = {}
    others = {}
    for name, layer in layers.items():
        options = [
            value
            for key, value in vars(layer).items()
            if key != "num_features" and not isinstance(value, dict)
        ]
        kind = type(layer), repr(options), *map(type, layer.children())
        if kind not in answers:
            answers[kind] = acts_as_batch_norm(layer)
        if not answers[kind]:
            others[name] = layer
    return others


def acts_as_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer is batch normalization, possibly with an activation or dropout.

    A layer with the `forward` of torch's class passes without a test, and so does a layer that
    stays in evaluation mode. Any other layer is run on random inputs. It must call
    `torch.nn.functional.batch_norm` once, in training mode. Its outputs must not depend on the
    running statistics, and the statistics must move towards those of the batch by the layer's
    momentum.
    """
    if type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer):
        return True
    if not isinstance(layer, _BatchNorm):
        return False
    calls = []

    def count(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["training"] if "training" in kwargs else args[4])
        return batch_norm(inputs, *args, **kwargs)

    try:
        with restore_after([layer]):
            # In a layer that stays in evaluation mode, rows do not interact, so it needs no test.
            if not layer.train().training:
                return True
        for inputs in _iterate_samples(layer):
            calls.clear()
            with BatchNormCalls(count):
                _run(layer, inputs, 1.0, 0.0)
            if calls != [True]:
                return False
            return layer.running_mean is None or _only_writes_statistics(layer, inputs)
    except Exception:
        # The user's code may raise any error.
        return False
    return False


def _iterate_samples(layer: Any) -> Iterator[Tensor]:
    """Yield inputs in the layer's precision, with each number of dimensions that it accepts."""
    dtype = torch.float32
    for tensor in (layer.running_mean, layer.weight):
        if tensor is not None:
            dtype = tensor.dtype
    for image_dims in (2, 0, 1, 3):
        shape = (6, layer.num_features, *[3] * image_dims)
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype) + 2
        with suppress(ValueError, RuntimeError, AssertionError):
            _run(layer, inputs, 1.0, 0.0)
            yield inputs


def _run(
    layer: Any,
    inputs: Tensor,
    momentum: float,
    start: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of a layer in training, and its buffers afterwards.

    The running statistics are set to `start` before the pass, and the layer is restored after it. A
    copy is not used, because a `forward` that was assigned to the layer may refer to the original.
    """
    with restore_after([layer], inputs.device), torch.no_grad():
        layer.train().momentum = momentum
        for name in STATISTICS:
            if getattr(layer, name, None) is not None:
                getattr(layer, name).fill_(start)
        torch.manual_seed(0)
        out = layer.forward(inputs.clone())
        return out, {name: buffer.clone() for name, buffer in layer.named_buffers()}


def _only_writes_statistics(layer: _BatchNorm, inputs: Tensor) -> bool:
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    batch_statistics = {"running_mean": inputs.mean(axes), "running_var": inputs.var(axes)}
    outputs = []
    for momentum, start in ((1.0, 5e5), (0.25, 3.0)):
        out, buffers = _run(layer, inputs, momentum, start)
        outputs.append(out)
        for name, buffer in layer.named_buffers():
            if name == "num_batches_tracked":
                if buffers[name] != start + 1:
                    return False
                continue
            # A pass must not change other buffers.
            expected = buffer
            if name in batch_statistics:
                statistics = batch_statistics[name]
                expected = torch.full_like(statistics, start).lerp(statistics, momentum)
            if not torch.allclose(buffers[name], expected, rtol=1e-4, atol=1e-4):
                return False
    return torch.equal(*outputs)


def count_values_per_row(
    model: nn.Module,
    inputs: Tensor,
    layers: Mapping[str, nn.Module],
) -> dict[str, list[int]]:
    """Count the values per channel that each layer normalizes for one row, in each of its calls.

    Args:
        model: The model around the layers.
        inputs: A batch (N, ...).
        layers: Layers with `num_features`, by name.
    """
    counts: dict[str, list[int]] = {name: [] for name in layers}

    def count(name: str, layer: Any, args: Any, out: Tensor) -> None:
        counts[name].append(out.numel() // (layer.num_features * len(inputs)))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(count, name)))
        with restore_after([model], inputs.device), torch.no_grad():
            model.eval()(inputs)
    return counts

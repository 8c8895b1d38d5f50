"""Features of images: the inputs of a model's classifier."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def record_features(model: nn.Module, outputs: int) -> Iterator[list[Tensor]]:
    """Record the input of the classifier of `model` in each forward pass inside this context.

    The classifier is the `nn.Linear` or `nn.Conv2d` with as many outputs as the model that runs
    last. Hooks find it, because modules may be registered in another order than they run.

    Args:
        model: Any model.
        outputs: Number of outputs of `model`.

    Yields:
        A list of one tensor after a pass: the input of the classifier, (N, ..., F) of a linear
        layer, or (N, F) of a convolution. The list stays empty if there is no classifier.
    """
    inputs = list[Tensor]()
    thread = threading.get_ident()

    def record(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Ignore another thread of the user's program that runs the same model at the same time.
        if threading.get_ident() != thread:
            return
        rows: Tensor = arguments[0]
        # A convolution classifies each position, and the model averages over the positions.
        inputs[:] = [rows.mean((2, 3)) if isinstance(layer, nn.Conv2d) else rows]

    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and len(layer.weight) == outputs:
                hook = layer.register_forward_pre_hook(record)
                stack.callback(hook.remove)
        yield inputs


def find_classifier(
    model: nn.Module, images: Tensor, outputs: int, run: Callable[[nn.Module, Tensor], Tensor]
) -> str:
    """Return the name of the linear layer that computes the outputs of the model, or "".

    Args:
        model: The model, in evaluation mode.
        images: Inputs (N, ...) of the model.
        outputs: Number of outputs of `model`.
        run: Function that calls a module with an input, in the precision of the run.
    """
    with torch.no_grad(), record_features(model, outputs) as recorded:
        expected = run(model, images)
        for features in recorded:
            name: str
            for name, layer in model.named_modules():
                if (
                    name
                    and features.dim() == 2
                    and isinstance(layer, nn.Linear)
                    and layer.weight.shape == (outputs, features.shape[1])
                    and torch.allclose(run(layer, features), expected)
                ):
                    return name
    return ""


class Head(nn.Module):
    """A model whose forward pass runs only its classifier, on features.

    It shares all submodules, parameters and buffers with the whole model, under the same names. So
    modes, checkpoints and weights files treat it as the whole model.
    """

    def __init__(self, model: nn.Module, classifier: str) -> None:
        super().__init__()
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            setattr(self, name, getattr(model, name))
        self._classifier = classifier

    def forward(self, features: Tensor) -> Tensor:
        """Map features (N, F) to outputs (N, outputs)."""
        out: Tensor = self.get_submodule(self._classifier)(features)
        return out

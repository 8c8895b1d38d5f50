"""Features of images: the inputs of a model's classifier."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def record_features(model: nn.Module, outputs: int) -> Iterator[list[Tensor]]:
    """Record the input of the classifier while `model` runs inside this context.

    The classifier is the last linear or convolutional layer to run that has as many outputs as the
    model. Hooks find it, because the order of a model's attributes may differ from that of its
    layers.

    Args:
        model: Any model.
        outputs: Number of its outputs.

    Yields:
        A list that holds the input (N, ...) of the classifier after each pass.
    """
    inputs = list[Tensor]()
    thread = threading.get_ident()

    def record(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Another thread of the user's program may run the same model at the same time.
        if threading.get_ident() != thread:
            return
        rows: Tensor = arguments[0]
        # A convolution classifies each position, and the model averages the results.
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
    """Return the name of the linear layer whose outputs are those of the model, or "".

    Args:
        model: The model, in evaluation mode.
        images: Inputs (N, ...) of the model.
        outputs: Number of its outputs.
        run: Runs a module on its inputs, in the precision of the run.
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
    """The last layer of a model, which computes the outputs from features.

    The modules and tensors are those of the whole model and have its names. So the mode trains,
    checkpoints contain, and weights files contain the whole model.
    """

    def __init__(self, model: nn.Module, classifier: str) -> None:
        super().__init__()
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            setattr(self, name, getattr(model, name))
        self._classifier = classifier

    def forward(self, features: Tensor) -> Tensor:
        """(N, F) -> (N, outputs)."""
        out: Tensor = self.get_submodule(self._classifier)(features)
        return out

"""The tensors of a model on one rank, which are optimized, averaged and saved.

The methods here assume that the rank has the whole model. Modes that divide the model override
them. Optimizer states are named `parameter//key`, and are on the same rank as their parameter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from trainer.models.undisturbed import is_plain
from trainer.modes.context import Context
from trainer.modes.flattening import apply_collective
from trainer.saving.tensor_files import Shard, StoredTensor, wrap_tensors


class ModelState:
    """Tensors of this rank by their names in the user's model, and their position in that model."""

    # Dimension of the rank grid over which the model is divided; None if every rank has the whole
    # model.
    divided_along: str | None = None
    module: nn.Module

    def __init__(self, context: Context) -> None:
        self.context = context
        self.recipe = context.recipe
        self.world = context.world
        self.device = self.world.device
        # Device of parameters, gradients and optimizer states between passes.
        self.gradient_device = self.device
        # True if the replicas' weights are bitwise equal after the latest step.
        self.has_equal_weights = self.recipe.traits.same_maths

    def modules(self) -> list[nn.Module]:
        """Return the whole model, or the stages of this rank."""
        return [self.module]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank by plain name: their name in the user's model."""
        return dict(self.module.named_parameters())

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of this rank that checkpoints contain, by plain name."""
        saved = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    def layout(self, named: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Locate tensors of this rank in the tensors of the whole model.

        Args:
            named: parameters, buffers or optimizer states by plain name.
        """
        return wrap_tensors(named)

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Return the shards that this rank saves, so that each shard is saved by exactly one rank.

        Args:
            named: parameters, buffers or optimizer states by plain name.
        """
        grid = self.world.grid
        if grid.coordinate("replicas"):
            return {}
        layout = self.layout(named)
        if grid.coordinate("shards") == 0:
            return layout
        # Tensors that are whole on every rank are saved by the rank of the first shard only.
        return {name: piece for name, piece in layout.items() if not piece.is_whole}

    def scatter(
        self,
        saved: Mapping[str, StoredTensor],
        named: Mapping[str, Tensor],
    ) -> None:
        """Copy this rank's shards of saved tensors into `named`.

        Only the rows of this rank are read from disk.

        Args:
            saved: tensors of the whole model by plain name.
            named: tensors of this rank by plain name.

        Raises:
            ValueError: `saved` lacks a tensor, or has it in another shape; no tensor is copied.
        """
        layout = self.layout(named)
        for name, piece in layout.items():
            if name not in saved or saved[name].shape != piece.shape:
                raise ValueError(f"no {name} of shape {tuple(piece.shape)}")
        with torch.no_grad():
            for name, piece in layout.items():
                piece.local.copy_(piece.rows_of(saved[name]))

    def outer_state(self) -> dict[str, Tensor]:
        """Return the state of the outer optimizer of `local_sgd` by checkpoint name.

        The state is equal on all ranks. It is empty in modes without an outer optimizer.
        """
        return {}

    def load_outer_state(self, saved: Mapping[str, StoredTensor]) -> None:
        """Load the result of `outer_state` from a checkpoint.

        Args:
            saved: tensors by checkpoint name; if empty, the optimizer starts from the current
                weights.
        """

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Make weights and moving averages equal on all ranks. Collective.

        The loop calls this before evaluation and before saving.

        Args:
            averages: moving averages by plain name.
        """

    @contextmanager
    def average_for_evaluation(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which all ranks have the weights that a checkpoint would contain.

        Only workers that train independently override this method.

        Args:
            averages: moving averages by plain name; empty without `ema`.
        """
        yield

    def broadcast_buffers(
        self,
        averages: Mapping[str, Tensor],
        along: str | None = None,
    ) -> None:
        """Copy buffers and their moving averages from rank 0 to all ranks. Collective.

        There is one message per data type, because a network has dozens of buffers of a few bytes
        each. Buffers that checkpoints do not contain (persistent=False) are sent too, because
        passes may read them.

        Args:
            averages: moving averages by plain name.
            along: dimension of the rank grid whose first rank sends, instead of rank 0 of the
                world.
        """
        tensors: list[Tensor] = []
        for module in self.modules():
            tensors += filter(is_plain, module.buffers())
        tensors += [averages[name] for name in self.named_buffers() if name in averages]
        apply_collective(tensors, partial(self.world.broadcast_, along=along))

    @contextmanager
    def weights(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the model computes with its moving averages.

        Storages are swapped, not copied. If `averages` is empty, the model uses its own weights.

        Args:
            averages: moving averages by plain name.
        """
        live = {**self.named_parameters(), **self.named_buffers()}
        pairs = [
            (live[name], average)
            for name, average in averages.items()
            if average.is_floating_point()
        ]

        def swap() -> None:
            for tensor, average in pairs:
                tensor.data, average.data = average.data, tensor.data

        swap()
        try:
            yield
        finally:
            swap()

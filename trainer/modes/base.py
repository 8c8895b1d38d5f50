"""The contract between the training loop and the modes; the base class is mode `single`.

A strategy owns forward, loss and backward together, because pipelines fuse them. The loop owns
everything else. The contract has three interfaces:

- `Strategy`, in this file: what a mode computes. The loop calls it.
- `ModelState` in `state.py`: this rank's tensors by name. Checkpoints and the optimizer use it.
- `Measures` in `measures.py`: what is timed and reported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import Batch, DataShare
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import StepRecorder
from trainer.distributed.matrix_exchange import MatrixExchange
from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.models.blocks import refreeze
from trainer.models.recompute import ALTERNATIVE, Run, list_runs
from trainer.modes.context import Context
from trainer.modes.measures import Measures
from trainer.modes.proofs import recompute_proven
from trainer.modes.state import ModelState
from trainer.recipe import Recipe
from trainer.recipe.shares import fixed_shares
from trainer.versions import torch_has


def compile_in_place(module: nn.Module) -> None:
    """Compile the calls of `module` without wrapping it, so that parameters keep their names.

    In older versions of torch, `module.compile()` does nothing for modules of torch.nn. For these,
    this function sets the attribute that `compile()` would set.
    """
    is_torch_module = (type(module).forward.__module__ or "").startswith("torch.nn.")
    if not is_torch_module or torch_has("compile() of torch.nn's own modules"):
        module.compile()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


class Strategy(ModelState, Measures):
    """One model on one device: mode `single`, and the base class of all other modes.

    A new mode overrides those of the following eight methods that must behave differently:

    - `connect`: connect ranks or devices once, after the model is on its device.
    - `outputs`: run the forward pass, in training and in evaluation.
    - `forward_backward`: add the gradients of a micro-batch.
    - `reduce_gradients`: sum gradients over replicas, once per step.
    - `after_step`: exchange weights, once per step.
    - `sync_weights`: make weights equal on all ranks, before evaluation and checkpoints.
    - `named_parameters`, `layout`: this rank's shards and their position in the whole model.

    The other methods are derived from these eight, or have defaults that suit a rank with the whole
    model.
    """

    # Exchange of rows of weights, for modes that divide weights.
    matrices: MatrixExchange | None = None

    def __init__(self, context: Context) -> None:
        ModelState.__init__(self, context)
        Measures.__init__(self, context)
        self.task = context.task
        share = context.share or self.data_share(self.recipe, self.world)
        self.set_shares(share)
        # Results of measurements go into the run folder, so that a resumed run uses the same plan.
        self.tuned = dict(context.tuned)
        # True if ranks exchange messages within passes that are captured in CUDA graphs. All ranks
        # capture such passes in the same step.
        self.captures_exchange = (
            self.recipe.graphs is True
            and self.world.size > 1
            and self.recipe.traits.exchanges_in_passes
            and cuda_graphs.has_cuda_graphs(self.device)
        )
        # True if a pass with sync=False contains no collective.
        self.has_local_passes = True
        # Groups of modules whose activations are recomputed together.
        self.recomputed: Sequence[Run] = ()
        # True if the recomputed blocks draw random numbers.
        self.is_recompute_random = False

    # The methods that a new mode overrides (and three in `state.py`).

    def connect(self) -> None:
        """Connect ranks or devices, for example with DDP, after `to_device` and `transform`."""
        self._parameters = list(self.named_parameters().values())
        self._trained = self._read_flags()

    def outputs(self, inputs: Tensor) -> Tensor:
        """Compute the model's outputs (N, ...) in the recipe's precision."""
        return self.context.in_precision(self.module, inputs)

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        """Run the forward and backward pass of a micro-batch, and add its gradients to `grad`.

        The gradients are those of `weight` times the sum of the loss over the rows of the batch.
        If workers train independently, the gradients are also multiplied by `divisor` (see
        `set_shares`).

        Args:
            batch: a micro-batch of this rank's local batch.
            weight: 1 / global batch size, so that the gradients summed over ranks and micro-batches
                are those of the mean loss.
            sync: False while more micro-batches of this step follow.

        Returns:
            `weight` times the summed loss of the rows whose outputs this rank has, 0-dim,
            detached, on the device.
        """
        scale = weight * self.divisor * len(batch.targets)
        with self.watched_forward():
            outputs = self.outputs(batch.inputs)
        loss = self.loss(outputs, batch.targets)
        if scale != 1.0:
            loss = loss * scale
        self.backward(loss)
        if self.divisor == 1:
            return loss.detach()
        return loss.detach() / self.divisor

    def reduce_gradients(self) -> None:
        """Sum gradients over replicas, unless the backward pass has summed them already."""

    def after_step(self, step: int) -> None:
        """Exchange weights after an optimizer step, if the mode does so. Called in every step.

        Args:
            step: number of finished steps.
        """

    # Preparation, in the order of calls.

    @classmethod
    def data_share(
        cls,
        recipe: Recipe,
        world: World,
    ) -> DataShare:
        """Return the part of every global batch that this rank reads."""
        return DataShare(
            world.rank,
            world.size,
            every_sample=recipe.traits.every_sample,
            numbers=fixed_shares(recipe),
        )

    def set_shares(self, share: DataShare) -> None:
        """Set the part of every global batch that this rank computes, from the next pass on."""
        self.share = share
        self.divisor: float = 1
        rows = share.count_rows(self.recipe)
        if share.every_sample:
            # A worker that trains independently minimizes the mean loss of its own local batch, so
            # its gradients are multiplied by `divisor`. The losses that workers report are not, so
            # they sum to the mean loss over all workers.
            self.divisor = sum(rows) / rows[share.index]

    def setup(self, model: nn.Module) -> None:
        """Prepare a model for training and move it from the CPU to this rank's device."""
        if self.recipe.recompute is True:
            self.recompute(model)
        self.to_device(model)
        self.transform()
        self.connect()

    def recompute(self, model: nn.Module) -> None:
        """Let the backward pass recompute the activations of blocks.

        Raises:
            RecipeError: the model has no blocks of several layers, or recomputation changes its
                gradients.
        """
        runs = list_runs(model)
        if not runs:
            raise RecipeError(
                f"model.name={self.recipe.model.name} has no blocks of several layers to "
                f"recompute: use {ALTERNATIVE}"
            )
        self.recomputed = runs[: self.context.recomputed]
        self.recompute_description = f"{len(self.recomputed)} of {len(runs)} blocks"
        others = runs[len(self.recomputed) :]
        self.note_draws(recompute_proven(self.context, model, self.recomputed, others))

    def note_draws(self, draws: bool) -> None:
        """Record whether recomputed blocks draw random numbers.

        Raises:
            RecipeError: the blocks draw random numbers, and `graphs=true` would capture them.
        """
        self.is_recompute_random = draws
        if draws and self.recipe.graphs is True and cuda_graphs.has_cuda_graphs(self.device):
            raise RecipeError(
                f"graphs=true is not possible here: model.name={self.recipe.model.name} draws "
                "random numbers in blocks that recompute=true recomputes, and a CUDA graph "
                "cannot restore their random states; use recompute=false, or graphs=false"
            )

    def to_device(self, model: nn.Module) -> None:
        """Move the model to the device that trains it."""
        self.module = self.context.place(model, self.device)

    def transform(self) -> None:
        """Compile, cut or shard the model."""
        # Recomputed blocks are compiled one by one instead, inside their recomputation.
        if self.recipe.compile and not self.recomputed:
            compile_in_place(self.module)

    def place_teacher(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Move the teacher of `distill.teacher` to this device, if it is elsewhere. Collective.

        Returns:
            A function that maps inputs to the teacher's outputs, without gradients.
        """
        return self.context.place(model, self.device)

    # Trained parameters, and the switch between training and evaluation.

    def train(self, training: bool = True) -> None:
        """Switch between training and evaluation.

        Normalization layers that `model.freeze` names do not update their statistics in training.
        """
        self.module.train(training)
        refreeze(self.module)

    def update_trainable(self) -> bool:
        """Adapt to the parameters that the model's own `train` leaves trainable. Collective.

        The loop calls this at the start of every epoch.

        Returns:
            True if the set of trained parameters has changed since the last call.

        Raises:
            RecipeError: the set has changed, and the mode cannot adapt to the change.
        """
        flags = self._read_flags()
        if flags == self._trained:
            return False
        self._trained = flags
        self.retrain()
        return True

    def _read_flags(self) -> dict[nn.Parameter, bool]:
        """Return `requires_grad` of each parameter that this rank has."""
        flags = {}
        for module in self.modules():
            for parameter in module.parameters():
                flags[parameter] = parameter.requires_grad
        return flags

    def retrain(self) -> None:
        """Adapt to a changed set of trained parameters. Collective.

        Raises:
            RecipeError: the mode cannot change the set of trained parameters.
        """

    def train_for_probe(self) -> None:
        """Switch to training mode for a pass that only measures.

        The model's own `train` may change `requires_grad` of parameters. Afterwards the values that
        `connect` or `update_trainable` read last are restored.
        """
        self.train()
        for parameter, trains in self._trained.items():
            parameter.requires_grad_(trains)

    # Methods that are derived from those above, or that few modes override.

    def loss(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Compute the task's loss in fp32: the mean over the rows, 0-dim."""
        return self.task.loss(outputs.float(), targets)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of `loss`, scaled if the precision is fp16."""
        self.context.scale(loss).backward()  # type: ignore[no-untyped-call]

    def record_pass(
        self,
        recorder: StepRecorder,
        batch: Batch,
        weight: float,
        sync: bool,
    ) -> tuple[Callable[[], None], Tensor]:
        """Capture `forward_backward` of `batch` in a CUDA graph.

        Returns:
            (replay, loss): a function that replays the pass on the current values of the batch's
            tensors, and the tensor into which the pass writes its loss.

        Raises:
            NotCapturable: the pass cannot be captured; nothing was computed.
        """
        return recorder.record(lambda: self.forward_backward(batch, weight, sync))

    def grad_norm(self) -> Tensor:
        """Compute the 2-norm of the whole model's gradient, 0-dim, on the device. Collective."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.divided_along is None:
            return norm
        squared = norm.float().square().to(self.gradient_device)
        return self.world.sum_(squared, self.divided_along).sqrt()

    def reduce_overflow(self, flag: Tensor) -> None:
        """Combine the non-finite flags of all parts of the model. Collective.

        Args:
            flag: 1 if a gradient of this rank is not finite, else 0; replaced by the maximum over
                ranks.
        """
        if self.divided_along is not None:
            self.world.max_(flag)

    def forward(self, inputs: Tensor) -> Tensor | None:
        """Compute outputs without gradients.

        Returns:
            The outputs (N, ...), or None on a rank that does not have the last stage.
        """
        with torch.no_grad():
            return self.outputs(inputs)

    def after_epoch(self, averages: Mapping[str, Tensor]) -> None:
        """Exchange weights at the end of an epoch, before evaluation, if the mode does so.

        Args:
            averages: moving averages by plain name; empty without `ema`.
        """

    def check_gradients(self) -> None:
        """Compare the gradient of all ranks with that of one rank alone. Collective.

        Only `ddp` overrides this method. The other modes compare nothing here.

        Raises:
            RecipeError: the gradients differ by more than rounding.
        """

    def close(self) -> None:
        """Release the resources that `setup` acquired."""

"""`fsdp`: parameters, gradients and optimizer states are sharded over the ranks.

The parameters of a block are gathered before the block computes and, with `fsdp.reshard=true`,
freed after its forward pass and gathered again for its backward pass.

The method is that of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel" (arXiv:2304.11277). Torch's `fully_shard` implements it
(docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

Only this file and `fsdp_units` handle torch's DTensors. Optimizer, moving average, clipping and
checkpoints see the rows of this rank, as plain parameters that share the DTensors' storage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.data import Batch
from trainer.devices.cuda_graphs import StepRecorder
from trainer.distributed.matrix_exchange import MatrixExchange
from trainer.distributed.peers import translate_peer_errors
from trainer.errors import RecipeError
from trainer.memory.measuring import count_bytes
from trainer.memory.needs import compute_unit_sizes, count_teacher_bytes
from trainer.models.norms import list_training_norms
from trainer.models.shapes import list_computed_tensors, replace_tensor
from trainer.modes.base import Strategy
from trainer.modes.ddp import needs_broadcasts
from trainer.modes.fsdp_units import (
    Order,
    compile_forward,
    copy_views,
    find_kept_parameter,
    find_sharding_obstacle,
    find_units,
    list_storages,
    list_whole_parameters,
)
from trainer.modes.measures import Communication
from trainer.modes.proofs import check_sharded, observe_whole
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.recipe.checks import count_weight_shards
from trainer.saving.tensor_files import Shard
from trainer.telemetry.clocks import synchronise


class FullyShardedDataParallel(Strategy):
    """A model that torch's `fully_shard` shards: each unit of `find_units`, then the root.

    With CUDA graphs, a captured pass contains its collectives. A replay runs none of torch's Python
    code, so each pass, eager or captured, starts and ends with all units sharded.

    The shards are in fp32. The class needs several ranks. With one rank, mode `fsdp` uses the class
    `Strategy`.
    """

    divided_along = "shards"
    # With `fsdp.offload` on a GPU, the weights are in host memory. This list then has the GPU that
    # copies them, and otherwise it is empty. The weights must not change before the copies end.
    readers: Sequence[torch.device] = ()

    def to_device(self, model: nn.Module) -> None:
        """Move the buffers, and the parameters of normalization layers, to the device.

        All other parameters move when their unit is sharded, because the whole model may be too
        large for the device.
        """
        if list_computed_tensors(model):
            raise self._refuse("keeps weights that are computed from others, as pruned ones")
        self._whole = observe_whole(self.context, model)
        # The checks below run the normalization layers, so every rank needs their values now.
        for layer in list_training_norms(model).values():
            self._receive(layer.parameters())
        self._receive(model.buffers())
        self._broadcasts = needs_broadcasts(self, model)
        if self.captures_exchange:
            # A replay runs no hook between a block and the wait for the weights of the next one.
            self.forward_watch = None
        if self.recipe.sync_bn:
            synchronise_batch_norm(model)
        self.module = model

    def _receive(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to this rank's device, contiguous, with the values of rank 0. Collective."""
        for tensor in tensors:
            if self.world.is_main:
                tensor.data = tensor.detach().to(self.device).contiguous()
                values = tensor.detach()
            else:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if values.numel():
                self.world.broadcast_(values.view(-1).view(torch.uint8))
            if not self.world.is_main:
                replace_tensor(tensor, values)

    def transform(self) -> None:
        shards = count_weight_shards(self.recipe, self.world.size)
        self.world.arrange({"replicas": self.world.size // shards, "shards": shards})
        self.shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        self.units = find_units(self.module)
        sizes = compute_unit_sizes(self.module, self.units)
        # Fraction of all parameter bytes that is in the largest unit.
        self.largest_unit = max(sizes) / max(1, sum(sizes))
        policy = OffloadPolicy()
        if self.recipe.fsdp.offload and self.device.type == "cuda":
            policy = CPUOffloadPolicy()
            self.gradient_device = torch.device("cpu")
            self.readers = [self.device]
        self.mesh = self.world.mesh()
        whole_storages = []
        # A comparison makes the hosts wait for each other, so on GPUs, after the first passes, the
        # ranks compare their order at the end of every 64th pass only.
        self.order = Order(self._refuse, every=1 if self.device.type == "cpu" else 64)
        with _explain_errors(self._refuse):
            for name in [*self.units, ""]:
                unit = self.module.get_submodule(name)
                reason = find_sharding_obstacle(unit, name)
                if reason:
                    raise self._refuse(reason)
                # `_receive` may replace the storage of a parameter, so both storages are recorded.
                whole_storages += list_storages(unit, name)
                self._receive(list_whole_parameters(unit).values())
                whole_storages += list_storages(unit, name)
                unit.register_forward_hook(copy_views)
                if self.forward_watch and (name or not self.units):
                    unit.register_forward_pre_hook(
                        partial(mark_training, self.forward_watch.__enter__)
                    )
                    unit.register_forward_hook(partial(mark_training, self.forward_watch.__exit__))
                if self.recipe.compile and name:
                    compile_forward(unit, name)
                reshard = self.recipe.fsdp.reshard and bool(name)
                fully_shard(
                    unit,
                    mesh=self.mesh,
                    reshard_after_forward=reshard,
                    offload_policy=policy,
                )
                self.order.watch(unit, name)
        # The loss is multiplied by `weight` already, so gradients are summed and not averaged.
        for module in self._sharded_modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        error = None
        reason = find_kept_parameter(whole_storages)
        if reason:
            error = self._refuse(reason)
        self.world.raise_any(error)

    def connect(self) -> None:
        self.has_local_passes = False
        # Torch's DTensors by name, and this rank's rows of them.
        self.sharded: dict[str, Any] = dict(self.module.named_parameters())
        self._local = {}
        for name, parameter in self.sharded.items():
            local = parameter.to_local().detach()
            self._local[name] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        heights = {p: self.shapes[name][0] for name, p in self._local.items()}
        self.matrices = MatrixExchange(self.world, heights)
        super().connect()
        with _explain_errors(self._refuse):
            check_sharded(self, self._whole, self.reduce_gradients)
        del self._whole

    def retrain(self) -> None:
        raise self._refuse("changes what trains (requires_grad) from epoch to epoch")

    def place_teacher(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        shards = self.world.grid.size("shards")
        size = count_bytes(*model.parameters(), *model.buffers())
        if count_teacher_bytes(size, count_bytes(*self.module.parameters()), shards) == size:
            return super().place_teacher(model)
        reason = (
            "keeps computed weights"
            if list_computed_tensors(model)
            else find_sharding_obstacle(model, "")
        )
        if reason:
            self.context.say(f"distill.teacher is whole on each rank, because it {reason}")
            return super().place_teacher(model)
        subject = f"distill.teacher={self.recipe.distill.teacher}"
        return shard_teacher(model, self.mesh, partial(refuse_sharding, subject))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self._local

    # The type is Any because the methods of FSDPModule have no annotations.
    def _sharded_modules(self) -> Iterator[Any]:
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        with _explain_errors(self._refuse):
            if self._broadcasts:
                self.broadcast_buffers({})
            # Torch sums gradients over the shards in every pass, but over replicas only on demand.
            # Between passes it keeps a sum over the shards in Python, where no replay finds it.
            if self.world.grid.size("replicas") > 1:
                next(self._sharded_modules()).set_requires_all_reduce(
                    sync or self.captures_exchange
                )
            loss = super().forward_backward(batch, weight, sync)
            used = [name for name, p in self.sharded.items() if p.grad is not None]
            self.order.end_pass(used)
            return loss

    def record_pass(
        self,
        recorder: StepRecorder,
        batch: Batch,
        weight: float,
        sync: bool,
    ) -> tuple[Callable[[], None], Tensor]:
        # Torch adds the gradients of a pass to those of the DTensors. Replays must add to the
        # memory that the capture of the first pass has allocated, so the DTensors get it back.
        for name, parameter in self.sharded.items():
            gradient = self._local[name].grad
            if gradient is not None:
                parameter.grad = DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        captured = super().record_pass(recorder, batch, weight, sync)
        # Torch would add the gradient of an eager pass to those that stay with the DTensors.
        self.reduce_gradients()
        return captured

    def _refuse(self, reason: str) -> RecipeError:
        return refuse_sharding(f"model.name={self.recipe.model.name}", reason)

    def watched_forward(self) -> AbstractContextManager[None]:
        """Return a context that measures nothing, because hooks measure the blocks instead.

        The time of a whole pass would include the time of waiting for weights between blocks.
        """
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Set the gradients of the local parameters to this rank's rows, which torch has summed."""
        synchronise(self.readers)
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                self._local[name].grad = parameter.grad.to_local().detach()
                # Drop the gradient, to which torch would otherwise add that of the next step.
                parameter.grad = None

    def forward(self, inputs: Tensor) -> Tensor | None:
        with _explain_errors(self._refuse):
            return super().forward(inputs)

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Copy rank 0's buffers and their moving averages to the other ranks.

        Before the copy, the buffers of the other ranks are stale.
        """
        self.order.compare()
        self.broadcast_buffers(averages)

    @contextmanager
    def weights(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the model computes with its moving `averages`.

        Values are copied, not swapped, because torch keeps references to the parameters' storages.
        """
        live = {**self.named_parameters(), **self.named_buffers()}
        trained_values = []
        for name, average in averages.items():
            if average.is_floating_point():
                trained_values.append((live[name].data, average))
        backups = [tensor.clone() for tensor, _ in trained_values]
        for tensor, average in trained_values:
            tensor.copy_(average)
        try:
            yield
        finally:
            # Units that are not resharded after their forward pass, such as the root's, keep their
            # gathered weights until a backward pass. Without this call, the next training pass
            # would use the gathered averages. With CUDA graphs, the next evaluation would use the
            # weights of this one, because a replay changes shards without torch's knowledge.
            end_pass(self.module)
            synchronise(self.readers)
            for (tensor, _), backup in zip(trained_values, backups, strict=True):
                tensor.copy_(backup)

    def layout(self, named: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Locate the rows of this rank, which are divided as by `torch.chunk`.

        Buffers and 0-dim tensors, such as a step counter, are whole on every rank.
        """
        pieces = super().layout(named)
        grid = self.world.grid
        for name, tensor in named.items():
            parameter = name.partition("//")[0]
            local = self._local.get(parameter)
            if local is None or not tensor.dim():
                continue
            assert tensor.shape == local.shape, (
                f"{parameter}: a state of another shape than the weight cannot be divided into rows"
            )
            shape = self.shapes[parameter]
            rows = -(-shape[0] // grid.size("shards"))
            start = rows * grid.coordinate("shards")
            pieces[name] = Shard(tensor, shape, min(start, shape[0]))
        return pieces

    def communication(
        self,
        steps: int,
        step_seconds: float,
        budget: float,
    ) -> Communication:
        """Estimate an upper bound of the time of communication from one timed all-reduce.

        The all-reduce has the size of one shard. It sends every byte twice, while an all-gather and
        a reduce-scatter send it once each.
        """
        shards = self.world.grid.size("shards")
        # The numbers of local rows, and the budgets, may differ between ranks. The sizes and the
        # number of messages must not, so they follow from the whole model and rank 0's budget.
        parameters = sum(shape.numel() for shape in self.shapes.values())
        size = 4 * parameters // shards
        budget = self.world.broadcast_object(budget)
        seconds = self.all_reduce_seconds(size, budget) * shards / 2
        transfers = 2 + self.recipe.fsdp.reshard
        return Communication(seconds * transfers * self.recipe.pieces, at_most=True)

    def notes(self) -> dict[str, str]:
        grid = self.world.grid
        replicas = ""
        if grid.size("replicas") > 1:
            replicas = f" x {grid.size('replicas')} replicas"
        offload = ""
        if self.readers:
            offload = ", kept on the host"
        return {
            "sharding": f"{grid.size('shards')} shards{replicas}, {len(self.units) + 1} units, "
            f"the largest {self.largest_unit:.0%} of the weights{offload}"
        }

    def result_fields(self) -> dict[str, Any]:
        grid = self.world.grid
        return {
            "fsdp": {
                "shards": grid.size("shards"),
                "replicas": grid.size("replicas"),
                "units": len(self.units) + 1,
                "largest_unit": self.largest_unit,
            }
        }


def shard_teacher(
    model: Any,
    mesh: DeviceMesh,
    refuse: Callable[[str], RecipeError],
) -> Callable[[Tensor], Tensor]:
    """Shard a teacher that every rank has whole, for passes without gradients.

    The returned function does not refer to a strategy, because the strategy may be created again.

    Args:
        model: the teacher.
        mesh: ranks to shard over.
        refuse: function that is called with the reason why the model cannot be sharded, and returns
            the error to raise.

    Returns:
        A function that maps inputs to the teacher's outputs.
    """
    order = Order(refuse, every=1 if mesh.device_type == "cpu" else 64)
    for name in [*find_units(model), ""]:
        unit = fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
        order.watch(unit, name)

    def run(inputs: Tensor) -> Tensor:
        with _explain_errors(refuse):
            outputs: Tensor = model(inputs)
            order.end_pass()
        end_pass(model)
        return outputs

    return run


def end_pass(root: Any) -> None:
    """End a pass without a backward pass, until which torch keeps weights and the pass's state."""
    state = root._get_fsdp_state()
    # There may not have been any pass yet.
    state._lazy_init()
    state._root_post_backward_final_callback()


@contextmanager
def _explain_errors(refuse: Callable[[str], RecipeError]) -> Iterator[None]:
    """Raise a RecipeError instead of torch's errors about blocks that cannot be sharded.

    Errors of collectives are translated by `translate_peer_errors`.
    """
    reasons = {
        "mixed torch.Tensor and DTensor": "uses a block's parameters outside of that block",
        "out of bounds for storage": "changes a block's outputs in place",
    }
    with translate_peer_errors():
        try:
            yield
        except (RuntimeError, ValueError) as error:
            for torch_message, reason in reasons.items():
                if torch_message in str(error):
                    raise refuse(reason) from error
            raise


def refuse_sharding(subject: str, reason: str) -> RecipeError:
    """Return the error that a model cannot be sharded.

    Args:
        subject: key and value that name the model, such as "model.name=resnet50".
        reason: end of the sentence that begins with `subject`.
    """
    return RecipeError(f"{subject} {reason}, which mode=fsdp cannot shard: use mode=ddp")


def mark_training(
    mark: Callable[[], object],
    unit: nn.Module,
    *_: Any,
) -> None:
    """Call `mark` if `unit` is in training mode. Used as a forward pre-hook and a forward hook.

    Torch gathers the unit's weights before its forward pre-hooks and frees them after its forward
    hooks, so that the time between two marks is computation only.
    """
    if unit.training:
        mark()

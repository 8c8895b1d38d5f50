"""`fsdp`: parameters, gradients and optimizer states are sharded over the ranks, and a block's are whole while it
computes.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277), by torch's
`fully_shard` (docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

torch's DTensors stay in this file: optimizer, moving average, clipping and checkpoints see this rank's rows, as plain
parameters that share their storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.models.memory import size_of
from trainer.models.norms import training_norms
from trainer.models.shapes import computed, give_values
from trainer.modes.base import Communication, Strategy
from trainer.modes.ddp import read_in_training
from trainer.modes.fsdp_units import (
    Order,
    Storage,
    compile_forward,
    copy_views,
    kept_whole,
    storages,
    teacher_share,
    unit_sizes,
    units_of,
    unshardable,
    whole_parameters,
)
from trainer.modes.proofs import check_sharded, observe_whole
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.processes.world import lost_peers
from trainer.recipe.checks import weight_shards
from trainer.saving.tensor_files import Piece
from trainer.telemetry.clocks import synchronise


class FullyShardedDataParallel(Strategy):
    """`fully_shard` on every block and on what is left, over fp32 shards."""

    sharded: Mapping[str, nn.Parameter] | None = None  # torch's DTensors by name, where there are several ranks
    readers: Sequence[torch.device] = ()  # that copy weights from the host, which are to stay as they are meanwhile

    def to_device(self, model: nn.Module) -> None:
        """Blocks go to the device one by one, as they are sharded: the whole model may be too large for it."""
        if self.world.size == 1:
            super().to_device(model)
            return
        if computed(model):
            raise self._refusal("keeps weights that are computed of others, as pruned ones")
        self._whole = observe_whole(self, model)
        for layer in training_norms(model).values():  # which are run to look at them
            self._receive(layer.parameters())
        self._receive(model.buffers())
        self._broadcasts = read_in_training(model)
        if self.recipe.sync_bn:
            synchronise_batch_norm(model)
        self.module = model

    def _receive(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values of a model's tensors, on this rank's device, and everywhere in the same memory order."""
        for tensor in tensors:
            if self.world.is_main:
                tensor.data = tensor.detach().to(self.device).contiguous()
                values = tensor.detach()
            else:
                values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if values.numel():
                self.world.broadcast_(values.view(-1).view(torch.uint8))
            if not self.world.is_main:
                give_values(tensor, values)

    def transform(self) -> None:
        if self.world.size == 1:
            super().transform()
            return
        shards = weight_shards(self.recipe, self.world.size)
        self.world.arrange({"replicas": self.world.size // shards, "shards": shards})
        self.shapes = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        self.units = units_of(self.module)
        sizes = unit_sizes(self.module, self.units)
        self.largest_unit = max(sizes) / max(1, sum(sizes))  # as a part of all parameters' bytes
        policy = OffloadPolicy()
        if self.recipe.fsdp.offload and self.device.type == "cuda":
            policy, self.home, self.readers = CPUOffloadPolicy(), torch.device("cpu"), [self.device]
        self.mesh, whole = self.world.mesh(), list[tuple[str, Storage]]()
        # On cards the hosts would wait for each other.
        self.order = Order(self._refusal, every=1 if self.device.type == "cpu" else 64)
        with lost_peers(), _explained(self._refusal):
            for name in [*self.units, ""]:
                unit = self.module.get_submodule(name)
                if (reason := unshardable(unit, name)) is not None:
                    raise self._refusal(reason)
                whole += storages(unit, name)
                self._receive(whole_parameters(unit).values())
                whole += storages(unit, name)
                unit.register_forward_hook(copy_views)
                if self.forward_watch is not None and (name or not self.units):
                    unit.register_forward_pre_hook(partial(timed, self.forward_watch.__enter__))
                    unit.register_forward_hook(partial(timed, self.forward_watch.__exit__))
                if self.recipe.compile and name:
                    compile_forward(unit, name)
                reshard = self.recipe.fsdp.reshard and bool(name)
                fully_shard(unit, mesh=self.mesh, reshard_after_forward=reshard, offload_policy=policy)
                self.order.watch(unit, name)
        for sharded in self._sharded_modules():  # gradients are of `weight` x the summed loss: they add up
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        reasons = self.world.gather(kept_whole(whole))
        if (reason := self.world.broadcast_object(next(filter(None, reasons), None))) is not None:
            raise self._refusal(reason)

    def connect(self) -> None:
        if self.world.size > 1:
            self.passes_apart = False
            self.sharded = dict(self.module.named_parameters())
            self._local = {
                name: nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
                for name, parameter in self.sharded.items()
            }
        super().connect()
        if self.world.size > 1:
            with lost_peers(), _explained(self._refusal):
                check_sharded(self, self._whole)
            del self._whole

    def place_teacher(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        parts, size = weight_shards(self.recipe, self.world.size), size_of(*model.parameters(), *model.buffers())
        if teacher_share(size, size_of(*self.module.parameters()), parts) == size:
            return super().place_teacher(model)
        if (reason := "keeps computed weights" if computed(model) else unshardable(model, "")) is not None:
            self.context.say(f"distill.teacher is whole on each rank, for it {reason}")
            return super().place_teacher(model)
        return _sharded(model, self.mesh, partial(_refused, f"distill.teacher={self.recipe.distill.teacher}"))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return super().named_parameters() if self.sharded is None else self._local

    def _sharded_modules(self) -> Iterator[Any]:  # FSDPModule has its methods without types
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        if self.sharded is None:
            return super().forward_backward(batch, weight, sync)
        with lost_peers():
            if self._broadcasts:
                self.broadcast_buffers({})
            if self.world.grid.size("replicas") > 1:  # gradients are reduced to shards in every pass all the same
                next(self._sharded_modules()).set_requires_all_reduce(sync)
            with _explained(self._refusal):
                loss = super().forward_backward(batch, weight, sync)
            self.order.end_pass([name for name, parameter in self.sharded.items() if parameter.grad is not None])
            return loss

    def _refusal(self, reason: str) -> RecipeError:
        return _refused(f"model.name={self.recipe.model.name}", reason)

    def watched_forward(self) -> AbstractContextManager[None]:
        """Blocks are timed one by one: between them a pass waits for weights from other ranks."""
        return super().watched_forward() if self.sharded is None else nullcontext()

    def reduce_gradients(self) -> None:
        """This rank's rows of the gradients, which are summed over all ranks already, for the optimizer."""
        synchronise(self.readers)
        for name, parameter in (self.sharded or {}).items():
            if parameter.grad is not None:
                self._local[name].grad = _local(parameter.grad)
                parameter.grad = None  # torch would add the next step's

    def grad_norm(self) -> Tensor:
        norm = super().grad_norm()
        return norm if self.sharded is None else self.world.sum_(norm.float().square().to(self.home), "shards").sqrt()

    def reduce_overflow(self, flag: Tensor) -> None:
        self.world.max_(flag)

    def forward(self, inputs: Tensor) -> Tensor | None:
        with lost_peers(), _explained(self._refusal):
            return super().forward(inputs)

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Rank 0's buffers are the truth: the others' are its own from here on."""
        if self.sharded is not None:
            self.order.compare()
            self.broadcast_buffers(averages)

    @contextmanager
    def weights(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        """Values are copied, not swapped: torch holds the parameters' storages."""
        if self.sharded is None:
            with super().weights(averages):
                yield
            return
        live = {**self.named_parameters(), **self.named_buffers()}
        floats = [(live[name].data, average) for name, average in averages.items() if average.is_floating_point()]
        kept = [tensor.clone() for tensor, _ in floats]
        for tensor, average in floats:
            tensor.copy_(average)
        try:
            yield
        finally:
            for unit in self._sharded_modules():  # without a backward pass what was gathered would stay, and train on
                unit.reshard()
            synchronise(self.readers)
            for (tensor, _), before in zip(floats, kept, strict=True):
                tensor.copy_(before)

    def layout(self, named: Mapping[str, Tensor]) -> dict[str, Piece]:
        if self.sharded is None:
            return super().layout(named)
        return {name: self._piece(name.partition("//")[0], tensor) for name, tensor in named.items()}

    def _piece(self, parameter: str, tensor: Tensor) -> Piece:
        """Rows are divided as by `torch.chunk`; buffers, and numbers as of steps, are whole."""
        local = self._local.get(parameter)
        if local is None or not tensor.dim():
            return Piece(tensor, tensor.shape)
        assert tensor.shape == local.shape, f"{parameter}: a state of another shape than the weight has no rows of it"
        shape = self.shapes[parameter]
        rows = -(-shape[0] // self.world.grid.size("shards"))
        return Piece(tensor, shape, min(rows * self.world.grid.coordinate("shards"), shape[0]))

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Piece]:
        pieces = super().pieces(named)
        if self.world.grid.coordinate("shards") == 0:
            return pieces
        return {name: piece for name, piece in pieces.items() if piece.local.shape != piece.shape}

    def communication(self, steps: int, step_seconds: float, budget: float) -> Communication:
        """As an all-reduce of a rank's part takes it, which sends every byte twice; a step may hide some of it."""
        if self.sharded is None:
            return Communication(0.0)
        parts = self.world.grid.size("shards")
        size = 4 * sum(shape.numel() for shape in self.shapes.values()) // parts  # ranks' own rows may be unequal
        budget = self.world.broadcast_object(budget)  # ranks' own may differ
        seconds = self.all_reduce_seconds(size, budget) * parts / 2
        return Communication(seconds * (2 + self.recipe.fsdp.reshard) * self.recipe.pieces, at_most=True)

    def notes(self) -> dict[str, str]:
        if self.sharded is None:
            return {}
        grid = self.world.grid
        replicas = f" x {grid.size('replicas')} replicas" if grid.size("replicas") > 1 else ""
        on_cpu = "; fsdp.offload moves nothing: they are in the host's memory already"
        where = ", kept on the host" if self.readers else on_cpu if self.recipe.fsdp.offload else ""
        return {
            "sharding": f"{grid.size('shards')} shards{replicas}, {len(self.units) + 1} units, the largest "
            f"{self.largest_unit:.0%} of the weights{where}"
        }

    def result_fields(self) -> dict[str, Any]:
        if self.sharded is None:
            return {}
        grid = self.world.grid
        return {
            "fsdp": {
                "shards": grid.size("shards"),
                "replicas": grid.size("replicas"),
                "units": len(self.units) + 1,
                "largest_unit": self.largest_unit,
            }
        }


def _sharded(model: Any, mesh: DeviceMesh, refusal: Callable[[str], RecipeError]) -> Callable[[Tensor], Tensor]:
    """What passes inputs, without gradients, through a model that every rank had whole. It holds nothing of a strategy,
    which may be made anew."""
    order = Order(refusal, every=1 if mesh.device_type == "cpu" else 64)
    for name in [*units_of(model), ""]:
        order.watch(fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True), name)

    def run(inputs: Tensor) -> Tensor:
        with lost_peers(), _explained(refusal):
            outputs: Tensor = model(inputs)
            order.end_pass()
        model._get_fsdp_state()._root_post_backward_final_callback()  # torch remembers passes up to a backward pass
        return outputs

    return run


@contextmanager
def _explained(refusal: Callable[[str], RecipeError]) -> Iterator[None]:
    """A RecipeError in place of torch's errors over a model whose blocks cannot be sharded apart."""
    reasons = {
        "mixed torch.Tensor and DTensor": "uses a block's parameters outside of that block",
        "out of bounds for storage": "changes a block's outputs in place",
    }
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = next((reason for words, reason in reasons.items() if words in str(error)), None)
        if reason is None:
            raise
        raise refusal(reason) from error


def _refused(what: str, reason: str) -> RecipeError:
    return RecipeError(f"{what} {reason}, which mode=fsdp cannot shard: use mode=ddp")


def timed(mark: Callable[[], object], unit: nn.Module, *_: Any) -> None:
    """Of a block in training: torch has its weights whole before, and lets go of them after."""
    if unit.training:
        mark()


def _local(tensor: Any) -> Tensor:
    """This rank's rows of a DTensor, which share its storage."""
    local: Tensor = tensor.to_local()
    return local.detach()

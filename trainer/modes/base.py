"""The contract between the loop and the modes; the base class is mode `single`.

A strategy owns forward, loss and backward as one, because pipelines fuse them. The loop owns everything else and asks
only what is here. A mode overrides what differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data import Batch, DataShare, Example
from trainer.devices import cuda_graphs
from trainer.devices.cuda_graphs import StepRecorder
from trainer.devices.precision import AUTOCAST
from trainer.errors import RecipeError
from trainer.models.blocks import hold_statistics
from trainer.models.recompute import WITHOUT, Run, runs_of
from trainer.modes.pipeline.orders import Span
from trainer.modes.proofs import recompute_proven
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.recipe.shares import given, rows_of
from trainer.recipe.versions import torch_has
from trainer.saving.tensor_files import Piece, StoredTensor
from trainer.tasks import Task
from trainer.telemetry.clocks import StepTimer, Stopwatch, synchronise


class Communication(NamedTuple):
    """What communication adds to a step: seconds that nothing hides, or at most so many; None where not measured."""

    seconds: float | None
    at_most: bool = False


@dataclass(frozen=True)
class Context:
    """What a mode is given, once."""

    recipe: Recipe
    world: World  # of this rank
    task: Task  # whose loss is made small
    example: Example  # a micro-batch on this rank
    samples: int = 0  # of an epoch, over all ranks
    share: DataShare | None = None  # of every global batch; None: as `Strategy.data_share` has it
    scale: Callable[[Tensor], Tensor] | None = None  # fp16's, of a loss before its backward pass
    tuned: Mapping[str, Any] = field(default_factory=dict)  # measured before to choose how to run, by `Strategy.tuned`
    say: Callable[[str], None] = lambda message: None  # prints a message, on rank 0
    recomputed: int | None = None  # so many first blocks are computed anew under recompute; None: all


def by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and type, together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [*groups.values()]


def in_a_row(tensors: Iterable[Tensor]) -> Tensor:
    """The numbers of tensors of one type, (n,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def put_back(row: Tensor, tensors: list[Tensor]) -> None:
    """Write what `in_a_row` gave into the tensors."""
    pieces = torch.split(row, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])


def compile_in_place(module: nn.Module) -> None:
    """`module.compile()`: calls of it are compiled from now on, its parameters keep their names."""
    of_torch = (type(module).forward.__module__ or "").startswith("torch.nn.")
    if not of_torch or torch_has("compile() of torch.nn's own modules"):
        module.compile()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


class Strategy:
    """One model on one device (mode `single`)."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.recipe, self.world, self.task = context.recipe, context.world, context.task
        self.device = self.world.device
        self.home = self.device  # where parameters, gradients and optimizer are between passes
        self.divide(self.context.share or self.data_share(self.recipe, self.world))
        # What was measured to choose how to run, kept in the run folder so that a resumed run does the same.
        self.tuned = dict(context.tuned)
        # What a rank computes of a step without the others: one forward pass, or of sharded weights a block's.
        parts = self.world.size * self.recipe.pieces * self.recipe.augment.together
        watched = self.recipe.traits.alike and self.world.size > 1
        watched &= self.recipe.batch_size % parts == 0 or self.recipe.shares is not None
        every = StepTimer.MARKED if self.device.type == "cuda" else 1
        self.forward_watch = Stopwatch(self.device, every) if watched else None
        # Whether passes exchange nothing, because they are recorded: `reduce_gradients` does it.
        self.exchanges_after_passes = (
            self.recipe.graphs is True and self.world.size > 1 and cuda_graphs.possible(self.device)
        )
        # Of steps that may be replayed whole passes are timed, which exchange nothing either: see `step_graphs`.
        self.times_passes = False
        self.passes_apart = True  # whether a pass with sync=False exchanges nothing
        self._autocast = AUTOCAST.get(self.recipe.precision)
        self.module: nn.Module
        self.recomputed: Sequence[Run] = ()  # blocks whose activations are computed anew
        self.recomputes: str | None = None  # in words
        self.draws_anew = False  # whether these blocks draw random numbers

    @classmethod
    def data_share(cls, recipe: Recipe, world: World) -> DataShare:
        """Which part of every global batch this rank reads."""
        return DataShare(world.rank, world.size, every_sample=recipe.traits.every_sample, numbers=given(recipe))

    def divide(self, share: DataShare) -> None:
        """From the next pass on this rank computes that part of a batch."""
        self.share = share
        # Workers that train apart have gradients of their own batch's mean; their losses are shares of that over all.
        rows = rows_of(self.recipe, share.count, numbers=share.numbers)
        self.divisor: float = sum(rows) / rows[share.index] if share.every_sample else 1

    def setup(self, model: nn.Module) -> None:
        """Take the model, on the CPU, to where it trains."""
        if self.recipe.recompute is True:
            self.recompute(model)
        self.to_device(model)
        self.transform()
        self.connect()

    def recompute(self, model: nn.Module) -> None:
        """Let backward passes compute blocks anew. Raises RecipeError where that would train another model."""
        every = runs_of(model)
        if not every:
            name = self.recipe.model.name
            raise RecipeError(f"model.name={name} has no blocks of several layers to compute anew: use {WITHOUT}")
        self.recomputed = every[: self.context.recomputed]
        self.recomputes = f"{len(self.recomputed)} of {len(every)} blocks"
        self.note_draws(recompute_proven(self, model, self.recomputed, every[len(self.recomputed) :]))

    def note_draws(self, draws: bool) -> None:
        """Blocks that are computed anew draw random numbers, or not. Raises RecipeError if they are to be recorded."""
        self.draws_anew = draws
        if draws and self.recipe.graphs is True and cuda_graphs.possible(self.device):
            raise RecipeError(
                f"graphs=true is not possible here: model.name={self.recipe.model.name} draws random numbers in blocks "
                "that recompute=true computes anew, and a recording cannot put their states back; use recompute=false, "
                "or graphs=false"
            )

    def to_device(self, model: nn.Module) -> None:
        """In its memory order."""
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        self.module = model.to(self.device, memory_format=layout)  # type: ignore[call-overload]

    def place_teacher(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Take a teacher to this device, unless it is there: what answers inputs without gradients. Collective."""
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        taught: nn.Module = model.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        return taught

    def transform(self) -> None:
        """Compile, cut or shard it: whatever changes how it computes or which part of it this rank has."""
        if self.recipe.compile and not self.recomputed:  # else each block is compiled, within what computes it anew
            compile_in_place(self.module)

    def connect(self) -> None:
        """What ties this rank to the others (DDP is put around the module here), and what later calls need."""
        self._parameters = list(self.named_parameters().values())

    def modules(self) -> list[nn.Module]:
        """The model, or this rank's stages of it."""
        return [self.module]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's trained parameters under the plain model's names."""
        return dict(self.module.named_parameters())

    def named_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers that belong in a checkpoint, under the plain model's names."""
        saved = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in saved}

    def train(self, training: bool = True) -> None:
        """Switch between training and evaluation."""
        self.module.train(training)
        self.keep_frozen([self.module])

    def keep_frozen(self, modules: Iterable[nn.Module]) -> None:
        """Normalisation that `model.freeze` names goes on with the statistics that it has, in training too."""
        for module in modules:
            hold_statistics(module)

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        """Add the gradients of weight x the loss summed over the batch's rows.

        Args:
            batch: a full micro-batch.
            weight: 1 / global batch size, so that gradients summed over ranks and micro-batches are the mean's.
            sync: False while more micro-batches of this step follow.

        Returns:
            weight x summed loss of the rows this rank has outputs for, 0-dim, detached, on the device.
        """
        scale = weight * self.divisor * len(batch.targets)
        with self.watched_forward():
            outputs = self.outputs(batch.inputs)
        loss = self.loss(outputs, batch.targets)
        loss = loss if scale == 1.0 else loss * scale
        self.backward(loss)
        return loss.detach() if self.divisor == 1 else loss.detach() / self.divisor

    def record_pass(
        self, recorder: StepRecorder, batch: Batch, weight: float, sync: bool
    ) -> tuple[Callable[[], None], Tensor]:
        """Record `forward_backward` of this batch, whose tensors stay where they are: what replays it, and its result.

        Raises:
            NotRecorded: it cannot be; nothing was computed.
        """
        return recorder.record(lambda: self.forward_backward(batch, weight, sync))

    def watched_forward(self) -> AbstractContextManager[None]:
        """Held over a forward pass of training."""
        return nullcontext() if self.times_passes else self.forward_watch or nullcontext()

    def outputs(self, inputs: Tensor) -> Tensor:
        """The model's outputs (N, ...) in the recipe's precision."""
        return self.in_precision(self.module, inputs)

    def in_precision(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """A forward pass of `module`, under autocast where the recipe asks for it."""
        if self._autocast is None:
            plain: Tensor = module(inputs)
            return plain
        with torch.autocast(self.device.type, self._autocast):
            out: Tensor = module(inputs)
        return out

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's, computed in fp32: the mean over the rows, 0-dim."""
        return self.task.loss(outputs.float(), targets)

    def backward(self, loss: Tensor) -> None:
        scale = self.context.scale
        (scale(loss) if scale else loss).backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self) -> None:
        """Combine gradients over replicas where backward has not done so already."""

    def grad_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, 0-dim, on the device."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def reduce_overflow(self, flag: Tensor) -> None:
        """Make an fp16 overflow seen by one part of the model known to all: the maximum of `flag`, in place."""

    def forward(self, inputs: Tensor) -> Tensor | None:
        """Outputs (N, ...) without gradients, or None on a rank that has none."""
        with torch.no_grad():
            return self.outputs(inputs)

    def after_step(self, step: int) -> None:
        """Called after every optimizer step, with the number of steps done."""

    def after_epoch(self, averages: Mapping[str, Tensor]) -> None:
        """Called at an epoch's end, before evaluation, with the moving averages there are."""

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Make the weights one over all ranks before evaluating or saving, and with them their moving `averages`."""

    def broadcast_buffers(self, averages: Mapping[str, Tensor], along: str | None = None) -> None:
        """Rank 0's buffers and their moving averages, or those of the first rank along a dimension, on every rank.

        Those of a type go in one message: a network has dozens of them, of a few bytes.
        """
        buffers = self.named_buffers()
        for tensors in by_type([*buffers.values(), *(averages[name] for name in buffers if name in averages)]):
            put_back(self.world.broadcast_(in_a_row(tensors), along), tensors)

    @contextmanager
    def weights(self, averages: Mapping[str, Tensor]) -> Iterator[None]:
        """The model computes with its moving `averages` inside this block, which are plain names of its weights.

        Storages are swapped, not copied. Without averages it computes with its own weights.
        """
        live = {**self.named_parameters(), **self.named_buffers()}
        floats = [(live[name], average) for name, average in averages.items() if average.is_floating_point()]

        def swap() -> None:
            for parameter, average in floats:
                parameter.data, average.data = average.data, parameter.data

        swap()
        try:
            yield
        finally:
            swap()

    def layout(self, named: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Which part of the whole model's tensors each of these is, which are this rank's under plain names."""
        return {name: Piece(tensor, tensor.shape) for name, tensor in named.items()}

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Piece]:
        """What this rank adds to the whole model: its pieces, where no other rank has the same."""
        return self.layout(named) if self.world.grid.coordinate("replicas") == 0 else {}

    def scatter(self, saved: Mapping[str, StoredTensor], named: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the whole model's saved tensors into `named`, under plain names.

        What a rank does not take, which may be part of a tensor, is never read.

        Raises:
            ValueError: `saved` lacks a tensor, or has it in another shape; nothing is copied.
        """
        layout = self.layout(named)
        for name, piece in layout.items():
            if name not in saved or saved[name].shape != piece.shape:
                raise ValueError(f"no {name} of shape {tuple(piece.shape)}")
        with torch.no_grad():
            for name, piece in layout.items():
                piece.local.copy_(piece.rows_of(saved[name]))

    def outer_state(self) -> dict[str, Tensor]:
        """What an optimizer of the mode's own keeps, the same on all ranks, by the names that checkpoints have."""
        return {}

    def load_outer_state(self, saved: Mapping[str, StoredTensor]) -> None:
        """Continue with it, or begin anew from the weights as they are where nothing of it was saved."""

    def notes(self) -> dict[str, str]:
        """Lines of the banner that this mode adds, by their title."""
        return {}

    def result_fields(self) -> dict[str, Any]:
        """Keys of result.json that this mode adds or fills."""
        return {}

    def figures(self) -> dict[str, float]:
        """TensorBoard values of the steps since the last call, beyond what every mode has. Collective."""
        return {}

    def timeline(self) -> list[list[Span]]:
        """On rank 0: when which stage worked in the last few steps that `figures` looked at. Collective."""
        return []

    def communication(self, steps: int, step_seconds: float, budget: float) -> Communication:
        """What communication adds to a step, of which this process trained so many, of so many seconds. Collective.

        Called after the last step; leaves no trace. A measurement may take `budget` seconds.
        """
        return Communication(0.0)

    def all_reduce_seconds(self, size: int, budget: float) -> float:
        """Seconds of an all-reduce of `size` bytes, on each rank as many; `budget` seconds may be spent. Collective."""
        sent = torch.zeros(size // 4, device=self.device)
        synchronise([self.device])
        seconds = 0.0
        for _ in range(2):  # the first connects and allocates
            if seconds > budget / 2:
                break
            self.world.barrier()
            begun = time.perf_counter()
            self.world.sum_(sent)
            synchronise([self.device])
            seconds = self._mean(time.perf_counter() - begun)
        return seconds

    def _mean(self, seconds: float) -> float:
        """Over the ranks."""
        return self.world.sum_(torch.tensor(seconds, device=self.device)).item() / self.world.size

    def close(self) -> None:
        """Let go of what `setup` took."""

"""`pipeline` over processes: one rank a stage, or several stages a rank, by `torch.distributed.pipelining`.

A world of P x R ranks holds R replicas of a model in P ranks' stages: rank r x P + p works for replica r. Schedules are
torch's (docs.pytorch.org/docs/stable/distributed.pipelining.html); evaluation is a chain of forward passes of our own,
because not all of them can evaluate.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.pipelining import PipelineStage, schedules

from trainer.data import Batch, DataShare
from trainer.errors import RecipeError
from trainer.models.partition import Traced
from trainer.models.undisturbed import undisturbed
from trainer.modes.base import Communication, Context, by_type, in_a_row, put_back
from trainer.modes.pipeline.orders import Action
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.torch_schedules import SCHEDULES, as_raised, holders, ranks_of_stages
from trainer.modes.pipeline.tuning import Pipe, Plan
from trainer.processes.world import World, lost_peers
from trainer.recipe import MEASURED, Recipe
from trainer.recipe.checks import microbatch_counts, ranks_per_pipeline, schedule_of
from trainer.recipe.versions import torch_has
from trainer.telemetry.clocks import Stopwatch


class _Received(torch.autograd.Function):
    """The identity; its gradient, which goes back to the rank before, is contiguous. That of `cat` would not be."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Wire(nn.Module):
    """A stage as neighbours see it: what goes between ranks is contiguous, channels_last images as (N, H, W, C)."""

    def __init__(self, stage: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self._run, self._first, self._last = stage, run, first, last

    def forward(self, received: Tensor) -> Tensor:
        if not self._first:
            received = _Received.apply(received)
            if received.dim() == 4:
                received = received.permute(0, 3, 1, 2)
        out = self._run(self.stage, received)
        if not self._last and out.dim() == 4:
            out = out.permute(0, 2, 3, 1)
        out = out.contiguous()
        # Schedules with a backward pass in two parts detach what was sent in place, which a view does not allow.
        return out.clone() if out._is_view() else out


class ProcessPipeline(Staged):
    """This rank's stages of one replica."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        recipe, size = self.recipe, self.world.size
        self.ranks = ranks_per_pipeline(recipe, size)
        self.replicas = size // self.ranks
        self.pipe_rank = self.world.rank % self.ranks
        self.averaging = Stopwatch(self.device)
        self._weight = 1.0
        self._losses: list[Tensor] = []

    @classmethod
    def data_share(cls, recipe: Recipe, world: World) -> DataShare:
        ranks, stages = ranks_per_pipeline(recipe, world.size), holders(recipe, world.size)
        replica, place = divmod(world.rank, ranks)
        first, last = stages[0] == place, stages[-1] == place
        reads = first or (last and recipe.distill.teacher is not None)  # whose outputs the last stage's loss takes
        return DataShare(replica, world.size // ranks, inputs=reads, targets=last, counted=first)

    def to_device(self, model: nn.Module) -> None:
        # Torch warns, on each rank, that messages of one group wait for each other: here they are meant to.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        ways = 1 + torch_has("gradients through a group of their own")
        self.world.arrange({"replicas": self.replicas, "stages": self.ranks}, groups={"stages": ways})
        self.pipe_group, self.back_group = self.world.group("stages"), self.world.group("stages", ways - 1)
        super().to_device(model)

    def transform(self) -> None:
        with lost_peers():
            super().transform()

    def describe_pipe(self, rows: int) -> Pipe:
        counts = tuple(microbatch_counts(self.recipe, self.world.size))
        schedules = [(schedule_of(self.recipe, self.world.size), len(holders(self.recipe, self.world.size)))]
        if self.recipe.pipeline.schedule is None and len(counts) > 1:
            parts = (1, 2) if self.recipe.pipeline.cuts == "auto" else (1,)
            schedules += [(MEASURED, self.ranks * virtual) for virtual in parts]
        return Pipe(self.ranks, tuple(schedules), rows, counts)

    def probe(self, traced: Traced, rows: int) -> list[Any]:
        """All ranks time all blocks at once, as they will work side by side; the mean counts."""
        costs = super().probe(traced, rows)
        times = torch.tensor([(cost.forward, cost.backward) for cost in costs], dtype=torch.float64)
        times = self.world.sum_(times) / self.world.size
        return [
            replace(cost, forward=forward, backward=backward)
            for cost, (forward, backward) in zip(costs, times.tolist(), strict=True)
        ]

    def assign_stages(self, plan: Plan) -> None:
        """Which ranks of a replica hold which stages."""
        self.holders = ranks_of_stages(plan.schedule, self.ranks, plan.stages // self.ranks)
        self.mine = [stage for stage, rank in enumerate(self.holders) if rank == self.pipe_rank]
        self.last = plan.stages - 1

    def build(self, traced: Traced, plan: Plan) -> None:
        self.deferred.clear()
        self.stages.clear()
        self.assign_stages(plan)
        everything = traced.stages(plan.cuts)
        samples = self._samples(everything, self.pipe.rows // plan.microbatches)
        for index in self.mine:
            self.stages[index] = self.prepare_stage(everything[index], self.device)
        parts = []
        for index, wire in self._wires(self.run_stage).items():
            part = PipelineStage(
                wire,
                index,
                len(self.holders),
                self.device,
                input_args=samples[index],
                output_args=samples[index + 1],
                group=self.pipe_group,
            )
            if not torch_has("stage inputs of any layout"):  # it would refuse channels_last images of one channel
                setattr(part, "_validate_fwd_input", lambda *_: None)  # noqa: B010
            # torch's own option makes groups without the recipe's timeout: 2.14 looks at the first, 2.15 at the second
            part._upstream_group = self.back_group
            setattr(part, "_get_p2p_group", self._group_between)  # noqa: B010
            parts.append(self._timed(part, index))
        kind: Any = SCHEDULES[plan.schedule]
        options = {"loss_fn": self._loss_of_microbatch, "scale_grads": False}
        if plan.schedule == MEASURED:
            options["stage_seconds"] = plan.stage_seconds
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(parts[0] if single else parts, plan.microbatches, **options)
        self._arriving = {index: samples[index] for index in self.mine}
        if self.recipe.compile:
            self._compile()

    def _compile(self) -> None:
        """Run each stage once as it trains and once as it evaluates, on samples, without a trace.

        So all ranks compile at the same time. Else a rank would wait for those before it, which compile one after
        another, and `timeout` is for a step.
        """
        with undisturbed(self.modules(), self.device):
            for training in (True, False):
                self.train(training)
                for index, wire in self._wires(self.run_stage if training else self.in_precision).items():
                    arriving = self._arriving[index].detach().requires_grad_(training and index > 0)
                    with torch.set_grad_enabled(training):
                        out = wire(arriving)
                    if out.requires_grad:  # not `backward`, which would leave gradients
                        wanted = [p for p in wire.parameters() if p.requires_grad]
                        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
                for deferred in self.deferred.values():
                    deferred.forget()

    def _wires(self, run: Callable[[nn.Module, Tensor], Tensor]) -> dict[int, Wire]:
        """This rank's stages, each called by `run`, as their neighbours see them."""
        return {index: Wire(stage, run, index == 0, index == self.last) for index, stage in self.stages.items()}

    def _group_between(self, source: int, target: int) -> Any:
        """For a message from stage to stage: of activations, or of gradients that go back."""
        return self.pipe_group if source < target else self.back_group

    def _samples(self, everything: Sequence[nn.Module], rows: int) -> list[Tensor]:
        """What goes into each stage and out of the last, as it travels: shapes and types are found by one pass."""
        travelling = self.sample(rows)
        samples = [travelling]
        for index, stage in enumerate(everything):
            stage.to(self.device).train(False)  # BatchNorm's statistics stay as they are
            arriving = travelling.detach().requires_grad_(index > 0)
            out = Wire(stage, self.in_precision, index == 0, index == self.last)(arriving)
            if index and not (out.requires_grad and grad(out.sum(), arriving, allow_unused=True)[0] is not None):
                raise RecipeError(
                    f"model.name={self.recipe.model.name} gives no gradient back over the cut after "
                    f"{self.plan.cuts[index - 1]}, which waits for one: use mode=ddp, or detach nothing between stages"
                )
            travelling = out.detach().requires_grad_()
            samples.append(travelling)
            if index not in self.mine:
                stage.to("cpu")  # the device may be too small for the whole model
        return samples

    def _timed(self, part: PipelineStage, index: int) -> PipelineStage:
        """Record when the stage works: its methods are what schedules call."""
        kinds = {"forward": "F", "backward": "B", "backward_weight": "W"}

        def timed(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
                letter = kind if kwargs.get("full_backward", True) else "I"
                with self.recorder.action(self.pipe_rank, Action(letter, index, chunk)), as_raised():
                    return method(chunk, *args, **kwargs)

            return run

        for name, kind in kinds.items():
            setattr(part, f"{name}_one_chunk", timed(getattr(part, f"{name}_one_chunk"), kind))
        return part

    def _loss_of_microbatch(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.weighted_loss(outputs, targets, self._weight)
        self._losses.append(loss.detach())
        scale = self.context.scale
        return scale(loss) if scale else loss

    def forward_backward(self, batch: Batch, weight: float, sync: bool = True) -> Tensor:
        self._weight = weight
        self._losses.clear()
        arguments = (batch.inputs,) if 0 in self.mine else ()
        target = batch.targets if self.last in self.mine else None
        with lost_peers(), self.recorder.step():
            self.schedule.step(*arguments, target=target, return_outputs=False)
        self.commit_statistics()
        return torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=self.device)

    def reduce_gradients(self) -> None:
        """Add up over the replicas what each got from its part of the batch, in one all-reduce a type of number."""
        if self.replicas == 1:
            return
        with self.averaging:
            for gradients in by_type(p.grad for p in self._parameters if p.grad is not None):
                put_back(self.world.sum_(in_a_row(gradients), "replicas"), gradients)

    def communication(self, steps: int, step_seconds: float, budget: float) -> Communication:
        """Between replicas; between stages it is part of the bubble."""
        return Communication(self.averaging.seconds() / max(1, steps))

    def grad_norm(self) -> Tensor:
        return self.world.sum_(super().grad_norm().float().square().to(self.device), "stages").sqrt()

    def reduce_overflow(self, flag: Tensor) -> None:
        self.world.max_(flag)

    def forward(self, inputs: Tensor) -> Tensor | None:
        """Micro-batches in waves through this replica's stages; the rank of the last stage has the logits.

        NCCL does what it is given in order, and a send may last until its receive begins. With several stages a rank a
        wave of as many micro-batches as there are other ranks is what the ring of ranks takes in before the first comes
        round: more would have every rank send and none receive.
        """
        count, wave = self.plan.microbatches, max(1, self.ranks - 1)
        wires = self._wires(self.in_precision)
        pieces = inputs.chunk(count) if 0 in self.mine else ()
        outputs: list[Tensor] = []
        sending: deque[tuple[Any, Tensor]] = deque()  # a tensor must live until it is sent
        with lost_peers(), torch.no_grad():
            for first in range(0, count, wave):
                here = list(pieces[first : first + wave])  # for this rank's next stage
                for index in self.mine:
                    arriving: Iterator[Tensor] = iter(here)
                    if index and self.holders[index - 1] != self.pipe_rank:
                        arriving = (self._receive(index) for _ in range(min(wave, count - first)))
                    here = []
                    for received in arriving:
                        out = wires[index](received)
                        if index == self.last or self.holders[index + 1] == self.pipe_rank:
                            here.append(out)
                            continue
                        to = self._rank(self.holders[index + 1])
                        sending.append((dist.isend(out, to, group=self.pipe_group), out))
                        if len(sending) > 2 * wave:
                            sending.popleft()[0].wait()
                outputs += here if self.last in self.mine else []
            for work, _ in sending:
                work.wait()
        return torch.cat(outputs) if self.last in self.mine else None

    def _receive(self, index: int) -> Tensor:
        """A micro-batch of a stage, from the rank that has the one before."""
        received = torch.empty_like(self._arriving[index])
        dist.recv(received, self._rank(self.holders[index - 1]), group=self.pipe_group)
        return received

    def _rank(self, pipe_rank: int) -> int:
        """Of this replica, among all."""
        return self.world.rank - self.pipe_rank + pipe_rank

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Each replica's BatchNorm has seen its own part of the batches: the first one's statistics are the truth."""
        self.broadcast_buffers(averages, "replicas")

"""`pipeline` in several processes, with `torch.distributed.pipelining`.

A world of P * R ranks has R replicas of a model, each in stages on P ranks. Rank r * P + p belongs
to replica r and has one or more of that replica's stages. All schedules are torch's
(docs.pytorch.org/docs/stable/distributed.pipelining.html), except `ScheduleMeasured`. Evaluation
runs plain forward passes instead of a schedule, because some of torch's schedules cannot evaluate.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.utils import get_total_norm

from trainer.data import Batch, DataShare
from trainer.devices.cuda_graphs import StepRecorder
from trainer.distributed.peers import translate_peer_errors
from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.models.equivalence import TOLERANCE
from trainer.models.undisturbed import restore_after
from trainer.modes.context import Context
from trainer.modes.ddp import read_in_training
from trainer.modes.flattening import apply_collective
from trainer.modes.pipeline.orders import Action
from trainer.modes.pipeline.stage_calls import StageCalls
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.torch_schedules import (
    SCHEDULES,
    assign_ranks,
    assign_recipe_ranks,
    unwrap_stage_errors,
)
from trainer.modes.pipeline.tuning import Pipe, Plan
from trainer.recipe import MEASURED, Recipe
from trainer.recipe.checks import (
    SPLIT_BACKWARD,
    microbatch_counts,
    ranks_per_pipeline,
    resolve_schedule,
)
from trainer.versions import torch_has


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient is made contiguous so that it can be sent to the previous rank.

    The gradient of `torch.cat`, for example, is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Wire(nn.Module):
    """A stage whose inputs and outputs have the layout of messages between ranks.

    Messages are contiguous. Tensors (N, C, H, W) are sent as (N, H, W, C), which needs no copy if
    they are channels_last.
    """

    def __init__(
        self,
        stage: nn.Module,
        run: Callable[[nn.Module, Tensor], Tensor],
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.stage = stage
        self._run = run
        self._is_first = first
        self._is_last = last

    def forward(self, received: Tensor) -> Tensor:
        if not self._is_first:
            received = _ContiguousGradient.apply(received)
            if received.dim() == 4:
                received = received.permute(0, 3, 1, 2)
        out = self._run(self.stage, received)
        if not self._is_last and out.dim() == 4:
            out = out.permute(0, 2, 3, 1)
        out = out.contiguous()
        # A view is cloned, because schedules that split the backward pass detach the sent tensor in
        # place, which torch refuses for a view.
        if out._is_view():
            return out.clone()
        return out


class ProcessPipeline(Staged):
    """A pipeline over several ranks: this rank computes some stages of one replica of the model."""

    divided_along = "stages"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.ranks = ranks_per_pipeline(self.recipe, self.world.size)
        self.pipe_rank = self.world.rank % self.ranks
        self.calls = StageCalls()
        self._weight = 1.0
        self._losses: list[Tensor] = []

    @classmethod
    def data_share(
        cls,
        recipe: Recipe,
        world: World,
    ) -> DataShare:
        ranks = ranks_per_pipeline(recipe, world.size)
        rank_of_stage = assign_recipe_ranks(recipe, world.size)
        replica, pipe_rank = divmod(world.rank, ranks)
        has_first = rank_of_stage[0] == pipe_rank
        has_last = rank_of_stage[-1] == pipe_rank
        # The rank of the last stage computes the loss. With a teacher, the rank also needs the
        # inputs, from which the teacher computes its outputs.
        needs_inputs = has_first or (has_last and recipe.distill.teacher is not None)
        return DataShare(
            replica,
            world.size // ranks,
            inputs=needs_inputs,
            targets=has_last,
            counted=has_first,
        )

    def to_device(self, model: nn.Module) -> None:
        # Suppress torch's warning that the messages of a group run one after another. This mode
        # uses groups in that way on purpose.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        groups = 1 + torch_has("gradients through a group of their own")
        self.world.arrange(
            {"replicas": self.share.count, "stages": self.ranks}, groups={"stages": groups}
        )
        self.pipe_group = self.world.group("stages")
        self.back_group = self.world.group("stages", groups - 1)
        self._broadcasts = read_in_training(model)
        super().to_device(model)

    def transform(self) -> None:
        with translate_peer_errors():
            super().transform()

    def describe_pipe(self, rows: int) -> Pipe:
        counts = tuple(microbatch_counts(self.recipe, self.world.size))
        schedule = resolve_schedule(self.recipe, self.world.size)
        schedules = [(schedule, len(assign_recipe_ranks(self.recipe, self.world.size)))]
        if self.recipe.pipeline.schedule is None and len(counts) > 1:
            schedules.append((MEASURED, self.ranks))
            if self.recipe.pipeline.cuts == "auto":
                schedules.append((MEASURED, 2 * self.ranks))
        return Pipe(self.ranks, tuple(schedules), rows, counts)

    def probe(self, rows: int) -> list[Any]:
        """Measure all blocks on all ranks at the same time. Collective.

        Ranks work at the same time in training too, and slow each other down.

        Returns:
            Costs of the blocks, whose times are averaged over the ranks.
        """
        costs = super().probe(rows)
        local_times = [(cost.forward, cost.backward) for cost in costs]
        times = torch.tensor(local_times, dtype=torch.float64)
        times = self.world.sum_(times) / self.world.size
        return [
            replace(cost, forward=forward, backward=backward)
            for cost, (forward, backward) in zip(costs, times.tolist(), strict=True)
        ]

    def assign_stages(self, plan: Plan) -> None:
        """Assign the stages of a plan to the ranks of a replica, and list those of this rank."""
        self.holders = assign_ranks(plan.schedule, self.ranks, plan.stages // self.ranks)
        holders = enumerate(self.holders)
        self.local_stages = [stage for stage, rank in holders if rank == self.pipe_rank]
        self.last = plan.stages - 1

    def build(self, plan: Plan) -> None:
        self.deferred.clear()
        self.stages.clear()
        self.assign_stages(plan)
        all_stages = self.traced.stages(plan.cuts)
        rows = self.pipe.rows // plan.microbatches
        samples = self._sample_messages(all_stages, self.context.sample(rows))
        evaluated = samples
        if self.context.example.evaluated:
            message = self.context.sample(rows, evaluated=True)
            evaluated = self._sample_messages(all_stages, message)
        for index in self.local_stages:
            self.stages[index] = self.prepare_stage(all_stages[index], self.device)
        pipeline_stages = []
        unsplit = []

        def find_group(source: int, target: int) -> Any:
            """Return the group for activations, sent forward, or for gradients, sent back."""
            return self.pipe_group if source < target else self.back_group

        for index, wire in self._wires(self.run_stage).items():
            stage = PipelineStage(
                wire,
                index,
                len(self.holders),
                self.device,
                input_args=samples[index],
                output_args=samples[index + 1],
                group=self.pipe_group,
            )
            # Older versions of torch refuse channels_last images of one channel, so their check of
            # inputs is replaced by a function that does nothing.
            if not torch_has("stage inputs of any layout"):
                setattr(stage, "_validate_fwd_input", lambda *_: None)  # noqa: B010
            # Private attributes select the group for gradients, because torch's own option would
            # create groups without the recipe's timeout. Torch 2.14 reads `_upstream_group`, and
            # torch 2.15 calls `_get_p2p_group`.
            stage._upstream_group = self.back_group
            setattr(stage, "_get_p2p_group", find_group)  # noqa: B010
            splits_backward = plan.schedule in SPLIT_BACKWARD and index > 0
            if splits_backward and not self._can_split_backward(stage, samples[index]):
                # Do not split the backward pass of this stage: with `dw_builder`, torch computes
                # all gradients in the input pass, and calls the builder's result as the weight
                # pass, which does nothing here.
                stage.dw_builder = lambda: lambda: None
                unsplit.append(index)
            self.calls.suppress_messages(stage)
            self._wrap_calls(stage, index)
            pipeline_stages.append(stage)
        if any(self.world.gather(unsplit)):
            self.context.say(
                f"pipeline.schedule={plan.schedule} does not split the backward pass of stages "
                "that use a weight more than once or are recomputed (recompute=true): there it "
                "fills no bubble"
            )
        kind = SCHEDULES[plan.schedule]
        options = {"loss_fn": self._loss_of_microbatch, "scale_grads": False}
        if plan.schedule == MEASURED:
            options["stage_seconds"] = plan.stage_seconds
        stage_argument: Any = pipeline_stages
        if issubclass(kind, schedules.PipelineScheduleSingle):
            stage_argument = pipeline_stages[0]
        self.schedule = kind(stage_argument, plan.microbatches, **options)
        self._evaluated_inputs = {index: evaluated[index] for index in self.local_stages}
        if self.recipe.compile:
            self._compile(samples)

    def _can_split_backward(
        self,
        stage: PipelineStage,
        stage_input: Tensor,
    ) -> bool:
        """Return True if a split backward pass computes the same gradients as a whole one.

        The first part computes the gradients of inputs, and the second part those of weights. Torch
        starts the second part at the operations that read a weight. If one weight is read twice in
        a row, the path between the two operations belongs to several weights, and the first of them
        frees it (torch 2.14).

        Args:
            stage: any stage except the first of the model.
            stage_input: a micro-batch of the stage's input.
        """
        # The second part would recompute the activations of the stage for every weight.
        if self.recipe.recompute:
            return False
        is_equal = False
        received = stage_input.detach().requires_grad_()
        leaves = [received]
        leaves += [weight for weight in stage.submod.parameters() if weight.requires_grad]
        # Torch raises many types of errors for stages that it cannot split. The result is then
        # False.
        with suppress(Exception), restore_after(self.modules(), self.device):
            self.train()
            output = stage.submod(received)
            # Any gradient can be used for the comparison; here it has the values of the output.
            gradient = output.detach().clone()
            whole = grad(output, leaves, gradient, retain_graph=True, materialize_grads=True)
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)
            values = {
                "stage_output": [output],
                "output_grads": [gradient],
                "input_values": [received],
            }
            _, groups = stage.backward_maybe_with_nosync("input", values)
            stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
            split: Any = [leaf.grad for leaf in leaves]
            error = get_total_norm(torch._foreach_sub(whole, split))
            is_equal = bool(error <= TOLERANCE[self.recipe.precision] * get_total_norm(whole))
        stage.submod.zero_grad()
        self.forget_statistics()
        return is_equal

    def _compile(self, samples: Sequence[Tensor]) -> None:
        """Compile this rank's stages by running a pass in training and a pass in evaluation.

        All ranks call this at the same time, and so compile in parallel. In a step they would
        compile one after another, and the waiting ranks might exceed `timeout`, which is meant for
        a step. State that the passes change is restored.

        Args:
            samples: a micro-batch of each stage's input in training.
        """
        with restore_after(self.modules(), self.device):
            for training in (True, False):
                self.train(training)
                run = self.run_stage if training else self.context.in_precision
                for index, wire in self._wires(run).items():
                    stage_input = samples[index] if training else self._evaluated_inputs[index]
                    stage_input = stage_input.detach()
                    stage_input.requires_grad_(training and index > 0)
                    with torch.set_grad_enabled(training):
                        out = wire(stage_input)
                    # Call `grad`, because `backward` would write gradients into the parameters.
                    if out.requires_grad:
                        trained = [p for p in wire.parameters() if p.requires_grad]
                        grad(out, trained, torch.ones_like(out), allow_unused=True)
                self.forget_statistics()

    def _wires(self, run: Callable[[nn.Module, Tensor], Tensor]) -> dict[int, Wire]:
        """Wrap the stages of this rank in `Wire`.

        Args:
            run: function that calls a stage with its input.
        """
        return {
            index: Wire(stage, run, index == 0, index == self.last)
            for index, stage in self.stages.items()
        }

    def _sample_messages(
        self,
        all_stages: Sequence[nn.Module],
        message: Tensor,
    ) -> list[Tensor]:
        """Run one pass to find the shape and type of each stage's input and of the last output.

        Args:
            all_stages: the stages of a replica.
            message: a micro-batch of inputs.

        Raises:
            RecipeError: a stage returns no gradient to the previous stage.
        """
        samples = [message]
        for index, stage in enumerate(all_stages):
            # The pass runs in evaluation, in which BatchNorm does not change its statistics.
            stage.to(self.device).train(False)
            received = message.detach().requires_grad_(index > 0)
            with restore_after([stage], self.device):
                run = self.context.in_precision
                out = Wire(stage, run, index == 0, index == self.last)(received)
                returns_gradient = index == 0
                if index and out.requires_grad:
                    gradients = grad(out.sum(), received, allow_unused=True)
                    returns_gradient = gradients[0] is not None
            if not returns_gradient:
                raise RecipeError(
                    f"model.name={self.recipe.model.name} returns no gradient over the cut "
                    f"after {self.plan.cuts[index - 1]}, where a stage waits for one: use "
                    "mode=ddp, or detach nothing between stages"
                )
            message = out.detach().requires_grad_()
            samples.append(message)
            if index not in self.local_stages:
                # Stages of other ranks return to the CPU, because the device may be too small for
                # the whole model.
                stage.to("cpu")
        return samples

    def _wrap_calls(
        self,
        stage: PipelineStage,
        index: int,
    ) -> None:
        """Wrap the methods that schedules call: `calls` runs them, and `recorder` times them."""

        def wrap(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
            method = unwrap_stage_errors()(method)

            def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
                letter = kind if kwargs.get("full_backward", True) else "I"
                work = partial(method, chunk, *args, **kwargs)
                action = Action(letter, index, chunk)
                with self.recorder.action(self.pipe_rank, action):
                    return self.calls.run(work, stage, action)

            return run

        kinds = {"forward": "F", "backward": "B", "backward_weight": "W"}
        for name, kind in kinds.items():
            method_name = f"{name}_one_chunk"
            setattr(stage, method_name, wrap(getattr(stage, method_name), kind))

    def _loss_of_microbatch(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Any:
        def compute_losses() -> tuple[Tensor, Tensor]:
            loss = self.weighted_loss(outputs, targets, self._weight)
            return loss, self.context.scale(loss)

        loss, scaled = self.calls.run(compute_losses)
        self._losses.append(loss.detach())
        return scaled

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        self._weight = weight
        self._losses.clear()
        # Copy the buffers that a pass may read from the first replica to the others. With several
        # micro-batches no copy is needed: `check_stages` has refused models whose passes change
        # such buffers.
        if self._broadcasts and self.plan.microbatches == 1 and self.calls.step_recorder is None:
            self.sync_weights({})
        arguments = (batch.inputs,) if 0 in self.local_stages else ()
        target = batch.targets if self.last in self.local_stages else None
        with translate_peer_errors(), self.recorder.step():
            self.schedule.step(*arguments, target=target, return_outputs=False)
            self.calls.run(self.commit_statistics)
        if self._losses:
            return torch.stack(self._losses).sum()
        return torch.zeros((), device=self.device)

    def record_pass(
        self,
        recorder: StepRecorder,
        batch: Batch,
        weight: float,
        sync: bool,
    ) -> tuple[Callable[[], None], Tensor]:
        """Capture the calls of a pass, whose replay exchanges messages as an eager pass does."""
        run = partial(self.forward_backward, batch, weight, sync)
        with self.calls.capturing(recorder) as captured, self.recorder.off():
            loss = run()
        self.forget_figures()

        def replay() -> None:
            with self.calls.replaying(captured):
                loss.copy_(run())

        return replay, loss

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas, with one all-reduce per data type.

        The time of this sum counts as communication. The time of messages between stages counts as
        bubble.
        """
        if self.share.count == 1:
            return
        with self.averaging:
            gradients = (p.grad for p in self._parameters if p.grad is not None)
            apply_collective(gradients, partial(self.world.sum_, along="replicas"))

    def forward(self, inputs: Tensor) -> Tensor | None:
        """Run micro-batches in waves through this replica's stages.

        NCCL executes operations in the order in which they are issued, and a send may not end
        before its receive begins. With several stages per rank, micro-batches return to the first
        rank. The ring of ranks can hold one micro-batch less than it has ranks, so a wave has this
        number of micro-batches. With more, every rank would send and no rank would receive.

        Returns:
            The outputs (N, ...) on the rank of the last stage; None on other ranks.
        """
        count = self.plan.microbatches
        wave = self.ranks - 1
        wires = self._wires(self.context.in_precision)
        microbatches = inputs.chunk(count) if 0 in self.local_stages else ()
        outputs = []
        # Tensors are kept here until they are sent.
        sends: deque[tuple[Any, Tensor]] = deque()
        with translate_peer_errors(), torch.no_grad():
            for first in range(0, count, wave):
                # Tensors that stay on this rank: first the micro-batches, then the outputs of each
                # stage whose next stage is here, and finally the outputs of the model.
                local_outputs = list(microbatches[first : first + wave])
                for index in self.local_stages:
                    stage_inputs = iter(local_outputs)
                    if index and self.holders[index - 1] != self.pipe_rank:
                        rest = min(wave, count - first)
                        stage_inputs = (self._receive(index) for _ in range(rest))
                    local_outputs = []
                    for stage_input in stage_inputs:
                        out = wires[index](stage_input)
                        if index == self.last or self.holders[index + 1] == self.pipe_rank:
                            local_outputs.append(out)
                            continue
                        target = self._world_rank(self.holders[index + 1])
                        work = dist.isend(out, target, group=self.pipe_group)
                        sends.append((work, out))
                        if len(sends) > 2 * wave:
                            sends.popleft()[0].wait()
                if self.last in self.local_stages:
                    outputs += local_outputs
            for work, _ in sends:
                work.wait()
        if self.last not in self.local_stages:
            return None
        return torch.cat(outputs)

    def _receive(self, index: int) -> Tensor:
        """Receive a micro-batch of the evaluation for stage `index`, from the previous stage."""
        received = torch.empty_like(self._evaluated_inputs[index])
        source = self._world_rank(self.holders[index - 1])
        dist.recv(received, source, group=self.pipe_group)
        return received

    def _world_rank(self, pipe_rank: int) -> int:
        """Convert a rank within this replica to a rank in the world."""
        return self.world.rank - self.pipe_rank + pipe_rank

    def sync_weights(self, averages: Mapping[str, Tensor]) -> None:
        """Copy the buffers of the first replica, and their moving averages, to the other replicas.

        The buffers differ before the copy, because the BatchNorm statistics of a replica are those
        of its own local batches.
        """
        self.broadcast_buffers(averages, "replicas")

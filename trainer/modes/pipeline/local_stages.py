"""Stages of a model on this rank: their passes, names, BatchNorm statistics and measurements.

All modes with stages use this module. Their cuts are chosen and checked in `stages`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from statistics import fmean
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trainer.models.blocks import refreeze
from trainer.models.recompute import checkpoint_forward
from trainer.modes.base import Strategy, compile_in_place
from trainer.modes.context import Context
from trainer.modes.deferred_batchnorm import DeferredStatistics
from trainer.modes.pipeline import orders
from trainer.modes.pipeline.orders import Span
from trainer.modes.pipeline.timeline import Recorder
from trainer.modes.pipeline.tuning import Pipe, Plan


class LocalStages(Strategy):
    """Some or all stages of a model, on the devices of this rank."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Stages of this rank, by their position in the model.
        self.stages: dict[int, nn.Module] = {}
        self.plan: Plan
        self.pipe: Pipe
        # Result of `find_deferrable`: number of values per channel in one sample, by layer.
        self.deferrable_layers: dict[nn.Module, int] = {}
        self.deferred: dict[nn.Module, DeferredStatistics] = {}
        # Modules that are in evaluation while the model trains (key True), and modules that are in
        # training while the model is evaluated (key False).
        self.exceptions: dict[bool, WeakSet[nn.Module]]
        # Names of the whole model's parameters, in their order.
        self.parameter_names: list[str]
        # Names of the tensors in the whole model's `state_dict`.
        self.saved_names: set[str]
        self.forget_figures()

    def recompute(self, model: nn.Module) -> None:
        """Let each stage recompute all of its activations, in `run_stage`.

        Only the input of a stage is kept between the forward and backward pass of a micro-batch.
        """
        self.recompute_description = "each stage"

    def defers(self, microbatches: int) -> bool:
        """Return True if the BatchNorm statistics of several micro-batches are combined."""
        return self.recipe.pipeline.deferred_batch_norm and microbatches > 1

    def prepare_stage(
        self,
        stage: nn.Module,
        device: torch.device,
    ) -> nn.Module:
        """Move a stage to its device.

        The stage's BatchNorm statistics are deferred if `defers` is True for the plan, and the
        stage is compiled with `compile=true`.
        """
        stage = self.context.place(stage, device)
        if self.defers(self.plan.microbatches):
            self.defer([stage])
        if self.recipe.compile:
            compile_in_place(stage)
        return stage

    def defer(self, stages: Iterable[nn.Module]) -> None:
        """Combine the BatchNorm statistics of these stages over each mini-batch."""
        if self.deferrable_layers:
            for stage in stages:
                self.deferred[stage] = DeferredStatistics(stage, self.deferrable_layers)

    def run_stage(
        self,
        stage: nn.Module,
        inputs: Tensor,
        rows: int | None = None,
        run: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the forward pass of one stage.

        Args:
            stage: a stage on the device of `inputs`.
            inputs: a micro-batch of the stage's input.
            rows: number of images of the micro-batch, by default `split_size()`. The first
                dimension of `inputs` may differ from this number.
            run: function that calls the stage, by default `Context.in_precision`.
        """
        run = run or self.context.in_precision
        deferred = self.deferred.get(stage) if stage.training else None
        if deferred:
            deferred.begin()
        if self.recipe.recompute:
            run = checkpoint_forward(run, [stage])
        out: Tensor = run(stage, inputs)
        if deferred:
            deferred.gather(self.split_size() if rows is None else rows)
        return out

    def split_size(self) -> int:
        """Return the number of images of the largest micro-batch."""
        return -(-self.pipe.rows // self.plan.microbatches)

    def commit_statistics(self) -> None:
        """Update the deferred BatchNorm statistics, if any, at the end of a mini-batch."""
        for deferred in self.deferred.values():
            deferred.commit()

    def forget_statistics(self) -> None:
        """Undo an incomplete mini-batch in the deferred BatchNorm statistics, if any."""
        for deferred in self.deferred.values():
            deferred.forget()

    def modules(self) -> list[nn.Module]:
        return list(self.stages.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        local: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            # All names of tied parameters are listed, because `parameter_names` contains one of
            # them only.
            local.update(stage.named_parameters(remove_duplicate=False))
        return {name: local[name] for name in self.parameter_names if name in local}

    def named_buffers(self) -> dict[str, Tensor]:
        local: dict[str, Tensor] = {}
        for stage in self.stages.values():
            local.update(stage.named_buffers())
        return {name: buffer for name, buffer in local.items() if name in self.saved_names}

    def train(self, training: bool = True) -> None:
        self.train_modules(self.stages.values(), training)

    def train_modules(
        self,
        modules: Collection[nn.Module],
        training: bool = True,
    ) -> None:
        """Switch modules between training and evaluation as the whole model's own `train` does.

        The model's `train` cannot be called, because the stages do not have this method.
        """
        for module in modules:
            module.train(training)
        for part in self.exceptions[training]:
            part.training = not training
        for module in modules:
            refreeze(module)

    def weighted_loss(
        self,
        outputs: Tensor,
        targets: Tensor,
        weight: float,
    ) -> Tensor:
        """Compute the summed loss of a micro-batch, multiplied by `weight`."""
        return self.loss(outputs, targets) * (weight * len(targets))

    # Measurements.

    def forget_figures(self) -> None:
        """Delete all measurements, for example those of eager steps when CUDA graphs begin."""
        self.recorder = Recorder(self.world.local_devices)
        # Bubble of each measured step: the fraction of the workers' time in which they are idle.
        self._bubbles: list[float] = []
        # Fraction of the workers' time, for each measured step, in which a host was still launching
        # an action's kernels.
        self._launching: list[float] = []
        self._recent: list[list[Span]] = []
        self._busy: list[float] = []

    def figures(self) -> dict[str, float]:
        steps = self.recorder.steps()
        if not steps:
            return {}
        self._recent = steps
        spans = steps[-1]
        local_length = torch.tensor(orders.measure_length(spans))
        length = self.world.max_(local_length).item()
        worker_seconds = self.pipe.workers * length
        self._busy = self.sum_busy_seconds(spans)
        bubble = 1 - sum(self._busy) / worker_seconds
        self._bubbles.append(bubble)
        local_launching = math.fsum(span.launching for span in spans)
        launching = self.world.sum_(torch.tensor(local_launching, dtype=torch.float64))
        launching_seconds = launching.item() / self.share.count
        self._launching.append(launching_seconds / worker_seconds)
        at_most = bubble + self._launching[-1]
        values = {"pipeline/bubble_pct": 100 * bubble, "pipeline/bubble_at_most_pct": 100 * at_most}
        for stage, seconds in enumerate(self._busy):
            values[f"pipeline/stage{stage}_busy_pct"] = 100 * seconds / length
        values["pipeline/bubble_predicted_pct"] = 100 * self.tuned["predicted"]["bubble"]
        return values

    def sum_busy_seconds(self, spans: Sequence[Span]) -> list[float]:
        """Sum the working time of each stage in a step, averaged over replicas. Collective."""
        seconds = torch.zeros(self.plan.stages, dtype=torch.float64)
        for span in spans:
            seconds[span.action.stage] += span.end - span.begin
        seconds = self.world.sum_(seconds) / self.share.count
        busy: list[float] = seconds.tolist()
        return busy

    def timeline(self) -> list[list[Span]]:
        """Return the spans of the first replica on rank 0, and an empty list on other ranks.

        The clock of the spans is the same for all ranks of one machine.
        """
        gathered = self.world.gather(self._recent if self.share.index == 0 else None)
        ranks = [steps for steps in gathered if steps is not None]
        return [[*chain.from_iterable(step)] for step in zip(*ranks, strict=True)]

    def notes(self) -> dict[str, str]:
        count = self.plan.microbatches
        size = self.split_size()
        at_most = "up to " if count * size > self.pipe.rows else ""
        return {
            "pipeline": f"{self.plan.stages} stages, {self.plan.schedule}, "
            f"{count} micro-batches of {at_most}{size}, "
            f"predicted bubble {self.tuned['predicted']['bubble']:.0%}",
            "cuts": f"after {', '.join(self.plan.cuts)}",
        }

    def result_fields(self) -> dict[str, Any]:
        """Return the key `pipeline` of result.json."""
        virtual = self.plan.stages // self.pipe.workers
        measured = None
        at_most = None
        if self._bubbles:
            # Leave out the first value if there are more: its step may be the first one of the run,
            # which warms up.
            measured = fmean(self._bubbles[1:] or self._bubbles)
            at_most = measured + fmean(self._launching[1:] or self._launching)
        return {
            "pipeline": {
                "stages": self.plan.stages,
                "ranks": self.pipe.workers,
                "replicas": self.share.count,
                "schedule": self.plan.schedule,
                "cuts": list(self.plan.cuts),
                "microbatches": self.plan.microbatches,
                "split_size": self.split_size(),
                "bubble_ideal": orders.compute_ideal_bubble(
                    self.pipe.workers,
                    self.plan.microbatches,
                    virtual,
                ),
                "bubble_predicted": self.tuned["predicted"]["bubble"],
                # Means over all workers and over the last step of each logged window. The upper
                # bound counts GPUs as idle while a host was still launching an action's kernels.
                "bubble_measured": measured,
                "bubble_at_most": at_most,
                # Working time in seconds of each stage in the latest measured step.
                "stage_seconds": self._busy,
                "trials": self.tuned["trials"],
            }
        }

"""What all modes share that hold a model in stages: names, cuts, deferred BatchNorm, the plan."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError, is_out_of_memory
from trainer.models.balance import BlockCost, block_costs
from trainer.models.given import has_hooks
from trainer.models.partition import Traced, trace
from trainer.models.recompute import anew
from trainer.models.undisturbed import undisturbed
from trainer.modes.base import Context, Strategy, compile_in_place
from trainer.modes.deferred_batchnorm import DeferredStatistics, deferrable
from trainer.modes.pipeline import orders, tuning
from trainer.modes.pipeline.orders import Span
from trainer.modes.pipeline.timeline import Recorder
from trainer.modes.pipeline.tuning import Pipe, Plan, Trial
from trainer.modes.proofs import held, stages_proven
from trainer.processes import faults
from trainer.processes.world import DATA_PATIENCE
from trainer.telemetry.clocks import synchronise
from trainer.telemetry.device_memory import forget_memory, free_memory

TRIAL_STEPS, TRIAL_SECONDS = (2, 50), 0.5  # at least and at most, the first to warm up; enough once so long


class Staged(Strategy):
    """A model in stages, some or all of them on this rank."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.stages: dict[int, nn.Module] = {}  # this rank's, by their place in the model
        self.recorder = Recorder(self.world.drives)
        self.plan: Plan
        self.pipe: Pipe
        self._values: dict[nn.Module, int] = {}  # of layers whose statistics are deferred
        self.deferred: dict[nn.Module, DeferredStatistics] = {}  # by stage
        self._bubbles: list[float] = []
        self._launching: list[float] = []  # share of the workers' time, beside each bubble
        self._recent: list[list[Span]] = []
        self._busy: list[float] = []
        self._ran: int | None = None  # micro-batches of the last trial that memory sufficed for

    def recompute(self, model: nn.Module) -> None:
        """A stage as a whole, whose micro-batches keep what it received alone: see `run_stage`."""
        self.recomputes = "each stage"

    def to_device(self, model: nn.Module) -> None:
        """In its memory order; each stage goes to its device when the cuts are known."""
        self._names = [name for name, _ in model.named_parameters()]
        self._saved = set(model.state_dict())
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        self.model = model.to(memory_format=layout)

    def transform(self) -> None:
        """Cut it as measured before, or now."""
        traced = trace(self.model, self.recipe.model.name)
        self.pipe = self.describe_pipe(self.context.example.rows)
        hooked = next((name for name, p in self.model.named_parameters() if has_hooks(p)), None)
        if hooked is not None and max(self.pipe.counts) > 1:
            raise RecipeError(
                f"model.name={self.recipe.model.name} has a hook of a parameter, {hooked}, which would act on each "
                "micro-batch: use mode=split, or mode=single"
            )
        if any(map(self.defers, self.pipe.counts)):
            instead = "pipeline.deferred_batch_norm=false, which takes those of each micro-batch"
            self._values = deferrable(self.model, self.context.example, f"set {instead}, or mode=ddp")
        self._held = {mode: held(self.model, mode) for mode in (True, False)}
        draws = self.world.all_or_none(lambda: self.world.is_main and stages_proven(self, traced), DATA_PATIENCE)
        self.note_draws(self.world.broadcast_object(draws) and self.recipe.recompute is True)
        self.plan = self._find_plan(traced)
        self.build(traced, self.plan)

    def _find_plan(self, traced: Traced) -> Plan:
        """The one of this run so far, or what is measured now."""
        plan = tuning.recall(self.tuned, tuning.key_of(traced, self.recipe, self.pipe), traced)
        if plan is None:
            probe, trial = partial(self.probe, traced), partial(self.trial, traced)
            tuner = tuning.Tuner(traced, self.recipe, self.pipe, probe, trial, self.context.say, self.room())
            plan, self.tuned = tuner.find_plan()
        return plan

    def connect(self) -> None:
        forget_memory(self.world.drives)
        del self.model  # stages that are not this rank's need no memory
        super().connect()

    def defers(self, microbatches: int) -> bool:
        """Whether BatchNorm's statistics are those of several passes."""
        return self.recipe.pipeline.deferred_batch_norm and microbatches > 1

    # What a mode has to define.

    def describe_pipe(self, rows: int) -> Pipe:
        """Stages, workers and possible micro-batches for so many rows."""
        raise NotImplementedError

    def build(self, traced: Traced, plan: Plan) -> None:
        """Take this rank's stages to their devices."""
        raise NotImplementedError

    # Stages.

    def probe(self, traced: Traced, rows: int) -> list[BlockCost]:
        """Seconds of each block for a micro-batch of so many rows; infinite where memory does not suffice."""
        try:
            return block_costs(traced, self.sample(rows), self.in_precision, repeats=2)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._free()
        return [BlockCost(math.inf, math.inf, 0)] * (len(traced.cuts) + 1)

    def room(self) -> float:
        """Free bytes of each worker, of the one with least."""
        devices = set(self.world.drives)
        sharing = len(self.world.drives) // len(devices) * self.world.sharing()
        free = min(free_memory(device) for device in devices) / sharing
        return -self.world.max_(torch.tensor(-free, dtype=torch.float64)).item()

    def trial(self, traced: Traced, plan: Plan) -> Trial:
        """Run a few steps as `plan` says, which leave no trace; infinite where memory does not suffice.

        Raises:
            DeviceMemoryError: it did not on one of several ranks, whose peers wait for it in the middle of a schedule.
        """
        try:
            result = self._trial(traced, plan)
            self._ran = plan.microbatches
            return result
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.world.size > 1:
                raise tuning.too_little(self.pipe, plan.microbatches, self._ran) from error
        for deferred in self.deferred.values():
            deferred.forget()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.recorder = Recorder(self.world.drives)
        self._free()
        return Trial(math.inf, (0.0,) * plan.stages)

    def _free(self) -> None:
        """Give back what a failed attempt had taken, so that a smaller one finds it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trial(self, traced: Traced, plan: Plan) -> Trial:
        self.plan = plan
        self.build(traced, plan)
        self.train()
        rows = self.pipe.rows
        batch = replace(self.context.example.zeros(self.device, rows), inputs=self.sample(rows))
        times: list[float] = []
        with undisturbed(self.modules(), self.device):
            while len(times) < TRIAL_STEPS[0] or (sum(times) < TRIAL_SECONDS and len(times) < TRIAL_STEPS[1]):
                self.synchronise()
                begun = time.perf_counter()
                if faults.active:
                    faults.fault(self.world.rank, f"trial-{plan.microbatches}")
                self.forward_backward(batch, 1 / rows)
                self.synchronise()
                times.append(self.world.broadcast_object(time.perf_counter() - begun))
        for parameter in self.named_parameters().values():
            parameter.grad = None
        busy = self.busy(self.recorder.steps()[-1])
        return Trial(min(times[1:]), tuple(busy))

    def synchronise(self) -> None:
        """Wait for all devices and ranks."""
        synchronise(self.world.drives)
        self.world.barrier()

    def busy(self, spans: Sequence[Span]) -> list[float]:
        """Seconds that each stage works in a step."""
        seconds = torch.zeros(self.plan.stages, dtype=torch.float64)
        for span in spans:
            seconds[span.action.stage] += span.end - span.begin
        summed: list[float] = (self.world.sum_(seconds) / self.share.count).tolist()
        return summed

    def sample(self, rows: int) -> Tensor:
        """Inputs of the recipe's shape on the device, to measure with."""
        return self.context.example.random(self.device, rows, self.recipe.channels_last)

    def prepare_stage(self, stage: nn.Module, device: torch.device) -> nn.Module:
        """A stage as it trains: on its device, its BatchNorm's statistics deferred."""
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        stage = stage.to(device, memory_format=layout)  # type: ignore[call-overload]
        if self.defers(self.plan.microbatches):
            self.defer([stage])
        if self.recipe.compile:
            compile_in_place(stage)
        return stage

    def defer(self, stages: Iterable[nn.Module]) -> None:
        """Gather the statistics of these over a mini-batch."""
        self.deferred |= {stage: DeferredStatistics(stage, self._values) for stage in stages if self._values}

    def run_stage(
        self,
        stage: nn.Module,
        inputs: Tensor,
        rows: int | None = None,
        run: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """One stage's forward pass, in the recipe's precision, its activations computed twice if it says so.

        Of a micro-batch of `rows` images, or as many as all have: activations may have another first dimension. `run`
        calls the stage, for `in_precision`.
        """
        run = run or self.in_precision
        deferred = self.deferred.get(stage) if stage.training else None
        if deferred is not None:
            deferred.begin()
        computed = anew(run, [stage]) if self.recipe.recompute else run
        out: Tensor = computed(stage, inputs)
        if deferred is not None:
            deferred.gather(self.split_size() if rows is None else rows)
        return out

    def split_size(self) -> int:
        """Images of a micro-batch, of the largest where they differ."""
        return -(-self.pipe.rows // self.plan.microbatches)

    def commit_statistics(self) -> None:
        """A mini-batch is complete."""
        for deferred in self.deferred.values():
            deferred.commit()

    def modules(self) -> list[nn.Module]:
        return list(self.stages.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        parts = (stage.named_parameters(remove_duplicate=False) for stage in self.stages.values())  # as tied ones have
        here = {name: p for part in parts for name, p in part}
        return {name: here[name] for name in self._names if name in here}

    def named_buffers(self) -> dict[str, Tensor]:
        here = {name: b for stage in self.stages.values() for name, b in stage.named_buffers()}
        return {name: buffer for name, buffer in here.items() if name in self._saved}

    def train(self, training: bool = True) -> None:
        self.train_modules(self.stages.values(), training)

    def train_modules(self, modules: Collection[nn.Module], training: bool = True) -> None:
        """As the whole model's own `train` does it, which stages do not have."""
        for module in modules:
            module.train(training)
        for part in self._held[training]:
            part.training = not training
        self.keep_frozen(modules)

    def weighted_loss(self, outputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        """weight x summed loss of a micro-batch."""
        return self.loss(outputs, targets) * (weight * len(targets))

    # Figures.

    def forget_figures(self) -> None:
        """Those of steps that were launched: from now on they are replayed."""
        self.recorder = Recorder(self.world.drives)
        self._bubbles, self._launching, self._recent, self._busy = [], [], [], []

    def figures(self) -> dict[str, float]:
        steps = self.recorder.steps()
        if not steps:
            return {}
        self._recent = steps
        spans = steps[-1]
        local = max(span.end for span in spans) - min(span.begin for span in spans)
        length = self.world.max_(torch.tensor(local)).item()
        busy = self.busy(spans)
        self._busy = busy
        bubble = 1 - sum(busy) / (self.pipe.workers * length)
        self._bubbles.append(bubble)
        launching = torch.tensor(math.fsum(span.launching for span in spans), dtype=torch.float64)
        self._launching.append(self.world.sum_(launching).item() / self.share.count / (self.pipe.workers * length))
        most = bubble + self._launching[-1]
        values = {"pipeline/bubble_pct": 100 * bubble, "pipeline/bubble_at_most_pct": 100 * most}
        values |= {f"pipeline/stage{stage}_busy_pct": 100 * seconds / length for stage, seconds in enumerate(busy)}
        return {**values, "pipeline/bubble_predicted_pct": 100 * self.tuned["predicted"]["bubble"]}

    def timeline(self) -> list[list[Span]]:
        """The first replica's; ranks of one machine share a clock."""
        gathered = self.world.gather(self._recent if self.share.index == 0 else None)
        ranks = [steps for steps in gathered if steps is not None]
        return [[span for spans in step for span in spans] for step in zip(*ranks, strict=True)]

    def notes(self) -> dict[str, str]:
        count, size = self.plan.microbatches, self.split_size()
        micro = f"{count} micro-batches of {'up to ' * (count * size > self.pipe.rows)}{size}"
        return {
            "pipeline": f"{self.plan.stages} stages, {self.plan.schedule}, {micro}, "
            f"predicted bubble {self.tuned['predicted']['bubble']:.0%}",
            "cuts": f"after {', '.join(self.plan.cuts)}",
        }

    def result_fields(self) -> dict[str, Any]:
        """result.json's `pipeline`."""
        virtual = self.plan.stages // self.pipe.workers
        # The first may be of the very first step, which warms up.
        measured, launching = (fmean(values[1:] or values or [0.0]) for values in (self._bubbles, self._launching))
        return {
            "pipeline": {
                "stages": self.plan.stages,
                "ranks": self.pipe.workers,
                "replicas": self.share.count,
                "schedule": self.plan.schedule,
                "cuts": list(self.plan.cuts),
                "microbatches": self.plan.microbatches,
                "split_size": self.split_size(),
                "bubble_ideal": orders.ideal_bubble(self.pipe.workers, self.plan.microbatches, virtual),
                "bubble_predicted": self.tuned["predicted"]["bubble"],
                # Of a few steps in each logged window, over all workers; at most, if GPUs idled while work was issued.
                "bubble_measured": measured if self._bubbles else None,
                "bubble_at_most": measured + launching if self._bubbles else None,
                "stage_seconds": self._busy,  # of work in a step, the last that was looked at
                "trials": self.tuned["trials"],
            }
        }

"""Choice of a model's cuts: the model is traced, its stages are checked, and plans are timed."""

import math
import time

import torch
from torch import nn

from trainer.errors import RecipeError, is_out_of_memory
from trainer.memory.device import forget_memory, free_memory, release_garbage
from trainer.models.balance import BlockCost, time_blocks
from trainer.models.given import has_hooks
from trainer.models.partition import trace
from trainer.models.undisturbed import restore_after
from trainer.modes.deferred_batchnorm import find_deferrable
from trainer.modes.pipeline import tuning
from trainer.modes.pipeline.local_stages import LocalStages
from trainer.modes.pipeline.stage_proof import check_stages, find_exceptions
from trainer.modes.pipeline.tuning import Pipe, Plan, Trial
from trainer.processes import faults
from trainer.telemetry.clocks import synchronise

# Minimum and maximum number of steps of a trial. The first step warms up, and its time is not used.
MIN_TRIAL_STEPS = 2
MAX_TRIAL_STEPS = 50
# After the minimum number of steps, a trial ends as soon as its steps have taken this number of
# seconds in total.
TRIAL_SECONDS = 0.5


class Staged(LocalStages):
    """A model in stages, whose cuts come from the recipe, the run folder or measurements."""

    # Number of micro-batches of the last trial that did not run out of memory; None before such a
    # trial.
    _last_fitting: int | None = None

    def to_device(self, model: nn.Module) -> None:
        """Keep the model on the CPU, in its memory format, until the cuts are known."""
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self.saved_names = set(model.state_dict())
        self.model = self.context.place(model, torch.device("cpu"))

    def transform(self) -> None:
        """Cut the model, by the plan in the run folder or by new measurements."""
        self.traced = trace(self.model, self.recipe.model.name)
        self.pipe = self.describe_pipe(self.context.example.rows)
        if max(self.pipe.counts) > 1:
            for name, parameter in self.model.named_parameters():
                if has_hooks(parameter):
                    raise RecipeError(
                        f"model.name={self.recipe.model.name} has a hook of a parameter, {name}, "
                        "which would act on each micro-batch: use mode=split, or mode=single"
                    )
        if any(map(self.defers, self.pipe.counts)):
            remedy = (
                "set pipeline.deferred_batch_norm=false, which uses the statistics of each "
                "micro-batch, or mode=ddp"
            )
            self.deferrable_layers = find_deferrable(self.model, self.context.example, remedy)
        self.exceptions = {mode: find_exceptions(self.model, mode) for mode in (True, False)}

        def check_on_main() -> bool:
            return self.world.is_main and check_stages(self, self.model, self.traced)

        draws = self.world.all_or_none(check_on_main)
        draws, self.traced.users = self.world.broadcast_object((draws, self.traced.users))
        self.note_draws(draws and self.recipe.recompute is True)
        key = tuning.build_key(self.traced, self.recipe, self.pipe)
        plan = tuning.recall_plan(self.tuned, key, self.traced)
        if plan is None:
            tuner = tuning.Tuner(
                self.traced,
                self.recipe,
                self.pipe,
                probe=self.probe,
                trial=self.trial,
                say=self.context.say,
                free_bytes=self.find_free_bytes(),
            )
            plan, self.tuned = tuner.find_plan()
        self.plan = plan
        self.build(plan)

    def connect(self) -> None:
        forget_memory(self.world.local_devices)
        # Drop the whole model, which would keep the stages of other ranks in memory.
        del self.model, self.traced
        super().connect()

    # Methods that each mode with stages must define.

    def describe_pipe(self, rows: int) -> Pipe:
        """Return the constraints on a plan, for a local batch of `rows` images."""
        raise NotImplementedError

    def build(self, plan: Plan) -> None:
        """Cut the model by `plan`, and move the stages of this rank to their devices."""
        raise NotImplementedError

    # Measurements of plans.

    def probe(self, rows: int) -> list[BlockCost]:
        """Measure the costs of each block for a micro-batch of `rows` images.

        Returns:
            Costs of the blocks; times are infinite if memory is too small.
        """
        try:
            inputs = self.context.sample(rows)
            return time_blocks(self.traced, inputs, self.context.in_precision, repeats=2)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_garbage()
        blocks = len(self.traced.cuts) + 1
        return [BlockCost(math.inf, math.inf, 0)] * blocks

    def find_free_bytes(self) -> float:
        """Return the number of free bytes of the worker that has the fewest. Collective."""
        devices = set(self.world.local_devices)
        workers_per_device = len(self.world.local_devices) // len(devices) * self.world.sharing()
        free = min(free_memory(device) for device in devices) / workers_per_device
        # The minimum over ranks is minus the maximum of the negative values.
        negative = torch.tensor(-free, dtype=torch.float64)
        return -self.world.max_(negative).item()

    def trial(self, plan: Plan) -> Trial:
        """Measure a few steps of a plan, and restore all state afterwards. Collective.

        Returns:
            The measurement; its time is infinite if memory is too small.

        Raises:
            DeviceMemoryError: one of several ranks ran out of memory. Its peers wait for it in the
                middle of a schedule, so they cannot continue.
        """
        try:
            result = self._trial(plan)
            self._last_fitting = plan.microbatches
            return result
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.world.size > 1:
                raise tuning.describe_too_little_memory(
                    self.pipe,
                    plan.microbatches,
                    self._last_fitting,
                ) from error
        self.forget_statistics()
        self.model.zero_grad()
        self.forget_figures()
        release_garbage()
        return Trial(math.inf, ())

    def _trial(self, plan: Plan) -> Trial:
        self.plan = plan
        self.build(plan)
        self.train()
        rows = self.pipe.rows
        batch = self.context.example.batch(self.device, rows, self.recipe.channels_last)
        times: list[float] = []
        with restore_after(self.modules(), self.device):
            while len(times) < MAX_TRIAL_STEPS:
                if len(times) >= MIN_TRIAL_STEPS and sum(times) >= TRIAL_SECONDS:
                    break
                self.synchronise()
                start = time.perf_counter()
                if faults.is_active:
                    faults.trigger(self.world.rank, f"trial-{plan.microbatches}")
                self.forward_backward(batch, 1 / rows)
                self.synchronise()
                times.append(self.world.broadcast_object(time.perf_counter() - start))
        for stage in self.modules():
            stage.zero_grad()
        busy = self.sum_busy_seconds(self.recorder.steps()[-1])
        return Trial(min(times[1:]), busy)

    def synchronise(self) -> None:
        """Wait for all devices and ranks. Collective."""
        synchronise(self.world.local_devices)
        self.world.barrier()

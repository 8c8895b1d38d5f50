"""`split`: a model that is too large for one device, in stages that work one after another."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from trainer.data import Batch
from trainer.modes.pipeline.orders import Action
from trainer.modes.pipeline.recorded import CapturablePipeline
from trainer.modes.pipeline.tuning import Pipe
from trainer.recipe import IN_TURN


class Split(CapturablePipeline):
    """Stages that work one after another; autograd sends gradients back over the devices.

    On several devices a pass is captured like that of a pipeline with one micro-batch.
    """

    def describe_pipe(self, rows: int) -> Pipe:
        workers = len(self.world.local_devices)
        return Pipe(workers, ((IN_TURN, workers),), rows, (1,))

    def outputs(self, inputs: Tensor) -> Tensor:
        for stage, device in zip(self.stages.values(), self.world.local_devices, strict=True):
            inputs = self.run_stage(stage, inputs.to(device, non_blocking=True))
        return inputs.to(self.device, non_blocking=True)

    def forward_backward(
        self,
        batch: Batch,
        weight: float,
        sync: bool = True,
    ) -> Tensor:
        loss = self.weighted_loss(self.outputs(batch.inputs), batch.targets, weight)
        self.backward(loss)
        self.commit_statistics()
        return loss.detach()

    @contextmanager
    def working(self, action: Action) -> Iterator[None]:
        # The base class also records times. They are useless for stages that work one at a time.
        with self.lanes[action.stage].working():
            yield

    def notes(self) -> dict[str, str]:
        return {
            "note": f"{self.plan.stages} stages work in turn, slower than one device if the model "
            "fits on it; mode=pipeline overlaps micro-batches",
            "cuts": super().notes()["cuts"],
        }

"""`dp`: `nn.DataParallel`, for comparison. One process copies the model to all GPUs every pass."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.models.recompute import Run, recompute
from trainer.models.undisturbed import restore_after
from trainer.modes.base import Strategy
from trainer.recipe.shares import split_rows


class Replica(nn.Module):
    """A model that enters autocast in its own `forward`.

    Autocast's data type is set per thread. Torch runs replicas in threads that enter autocast
    without a data type, which on CUDA means fp16. So each replica sets the recipe's data type.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module, Tensor], Tensor],
        recomputed: Sequence[Run],
    ) -> None:
        super().__init__()
        self.model = model
        self.run = run
        self.recomputed = recomputed

    def forward(self, inputs: Tensor) -> Tensor:
        # A replica must recompute its own blocks, not those of the original model.
        if getattr(self.model, "_is_replica", False):
            recompute(self.model, self.recomputed)
        return self.run(self.model, inputs)


class DataParallel(Strategy):
    """`nn.DataParallel` over the devices of the process.

    On a CPU, the module is called with the whole batch, as torch does without CUDA.
    """

    def connect(self) -> None:
        super().connect()
        self.passes_through = self.device.type != "cuda"
        self.wrapped: nn.Module = Replica(self.module, self.context.in_precision, self.recomputed)
        # nn.DataParallel is not used on a CPU: on a machine with GPUs, nn.DataParallel would use
        # the GPUs although `devices` in the recipe is the CPU.
        if not self.passes_through:
            device_ids = [device.index for device in self.world.local_devices]
            self.wrapped = nn.DataParallel(self.wrapped, device_ids)
        self.shapes = self._describe_shapes()

    def outputs(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.wrapped(inputs)
        return out

    def _describe_shapes(self) -> str:
        """Describe the shapes of inputs and outputs, outside and inside the replicas."""
        shapes_inside = []

        def note(
            module: nn.Module,
            inputs: tuple[Tensor, ...],
            output: Tensor,
        ) -> None:
            images = inputs[0]
            shapes_inside.append((tuple(images.shape), tuple(output.shape)))

        hook = self.module.register_forward_hook(note)
        with restore_after([self.module], self.device):
            self.train(False)
            outputs = self.forward(self.context.sample())
        hook.remove()
        assert outputs is not None
        shapes_inside.sort(reverse=True)
        inputs_inside = ", ".join(str(pair[0]) for pair in shapes_inside)
        outputs_inside = ", ".join(str(pair[1]) for pair in shapes_inside)
        return (
            f"in {self.context.example.shape} outside, {inputs_inside} inside; "
            f"out {outputs_inside} inside, {tuple(outputs.shape)} outside"
        )

    def notes(self) -> dict[str, str]:
        devices = len(self.world.local_devices)
        if self.passes_through:
            cards = max(2, devices)
            rows = "+".join(map(str, split_rows(self.context.example.rows, cards)))
            note = (
                f"nn.DataParallel without CUDA passes through to one device ({cards} GPUs would "
                f"get {rows} images): no speed to compare; mode=ddp is faster"
            )
        else:
            note = f"nn.DataParallel over {devices} devices is for comparison; mode=ddp is faster"
            if self.recipe.channels_last and devices > 1:
                note += (
                    ". It copies weights without their channels_last format, so each pass of a "
                    "copy reorders them"
                )
        return {"note": note, "shapes": self.shapes}

    def result_fields(self) -> dict[str, Any]:
        devices = 1 if self.passes_through else len(self.world.local_devices)
        return {"data_parallel": {"devices": devices, "pass_through": self.passes_through}}

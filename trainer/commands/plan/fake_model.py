"""A model whose tensors have shapes but no values, to count the memory and FLOPs of its passes.

Nothing is allocated or computed. The forward and backward pass call the same operators as in
training, and each operator only computes the shapes of its outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.data import Example, TensorSpec
from trainer.devices.precision import autocast
from trainer.errors import RecipeError, read_line
from trainer.memory.measuring import (
    Pass,
    Resident,
    count_bytes,
    count_saved_buffers,
    measure_pass,
)
from trainer.memory.needs import compute_unit_sizes
from trainer.memory.prediction import StagedModel
from trainer.models.balance import BlockCost, choose_cuts
from trainer.models.blocks import refreeze
from trainer.models.partition import Traced, trace
from trainer.models.recompute import checkpoint_forward, list_runs, recompute
from trainer.modes.fsdp_units import find_units
from trainer.modes.pipeline.orders import compute_ideal_bubble
from trainer.modes.pipeline.ranks import Wire
from trainer.modes.pipeline.torch_schedules import assign_ranks, list_actions
from trainer.optim.optimizers import build_optimizer, name_optimizer_state
from trainer.optim.trainable import find_roles
from trainer.recipe import ModelRecipe
from trainer.recipe.known_names import TIMM
from trainer.recipe.layout import Layout
from trainer.training.teaching import load_teacher

# Number of micro-batches per worker if the recipe leaves it open. With this number, workers with
# equal stages wait for at most 20 % of a step (see `compute_ideal_bubble`).
MICROBATCHES = 4


class StagePass(NamedTuple):
    """Pass of one micro-batch through a stage.

    Attributes:
        memory: memory that the pass allocates.
        sent: bytes of the stage's outputs.
        flops: floating-point operations of the forward pass.
    """

    memory: Pass
    sent: int
    flops: int


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        names: names of the modules after which the model is cut.
        microbatches: number of micro-batches of a local batch.
        rows: number of images of a micro-batch; of the largest one if they differ.
        holders: number of the worker that holds each stage, from 0.
        stages: pass of a micro-batch through each stage.
        gradients: bytes of each worker's gradients.
        ideal: fraction of a step in which a worker waits, if all stages take equally long.
        balanced_by: what decided the cuts: "recipe", "flops" or "seconds".
    """

    names: Sequence[str]
    microbatches: int
    rows: int
    holders: Sequence[int]
    stages: Sequence[StagePass]
    gradients: Sequence[int]
    ideal: float
    balanced_by: str


class FakeModel:
    """A recipe's model whose weights and gradients have shapes but no values.

    On a machine without a GPU, the CPU's operators stand in for a GPU's.

    Args:
        layout: recipe and devices to plan for.
        images: size and shape of the data set.
        recomputed: number of blocks, from the first one on, that are recomputed if the recipe says
            `recompute=true`. None: all blocks. Modes with stages ignore this number.
    """

    def __init__(self, layout: Layout, images: DatasetFacts, recomputed: int | None = None) -> None:
        recipe = layout.recipe
        self.recipe = recipe
        self.images = images
        self.task = images.task(recipe)
        is_cuda = layout.kind == "cuda" and torch.cuda.is_available()
        self.device = torch.device("cuda" if is_cuda else "cpu")
        self._cpu = layout.kind == "cpu"
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = self._build().train()
        refreeze(self.model)
        self.runs = list_runs(self.model)
        if recipe.recompute is True and not recipe.traits.staged:
            recompute(self.model, self.runs[:recomputed], random=False)
        self._roles = find_roles(self.model, recipe)
        # The result is cached by (rows, gradients), because several layouts need the same pass.
        self.whole = cache(self._whole)

    def _build(self) -> nn.Module:
        """Build the model with fake parameters. Published weights are not downloaded."""
        starting = not _is_published(self.recipe.model)
        layout = torch.contiguous_format
        if self.recipe.channels_last:
            layout = torch.channels_last
        try:
            with torch.device("meta"):
                model = self.images.model(self.recipe, starting)
        except RuntimeError:
            # The constructor of some models computes with values, which the meta device lacks.
            # Build such a model on the CPU. The code below moves it to the meta device.
            model = self.images.model(self.recipe, starting)
        model = model.to("meta", memory_format=layout)  # type: ignore[call-overload]
        with self._fake:
            fake: nn.Module = model._apply(partial(torch.empty_like, device=self.device))
        return fake

    # --- Bytes of weights, optimizer state and batches

    def resident(self, module: nn.Module) -> Resident:
        """Return the bytes that the model or one stage keeps from step to step."""
        parameters = dict(module.named_parameters())
        with self._fake:
            optimizer = build_optimizer(parameters, self.recipe.optimizer, self._roles)
            state = count_bytes(*name_optimizer_state(optimizer, parameters).values())
        weights = count_bytes(*parameters.values())
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        ema = 0
        if self.recipe.ema is not None:
            ema = weights + count_saved_buffers(module)
        buffers = count_bytes(*module.buffers())
        return Resident(weights, count_bytes(*trained), state, ema, buffers)

    @cached_property
    def teacher(self) -> int:
        """Bytes of the weights of distill.teacher; 0 if the recipe has no teacher.

        Published weights are not downloaded.

        Raises:
            TrainerError: the teacher cannot be built.
        """
        if self.recipe.distill.teacher is None:
            return 0
        inputs = self.images.example(1).inputs
        outputs = self.task.outputs() or 0
        teacher = load_teacher(self.recipe, inputs, outputs, starting=False)
        return count_bytes(*teacher.weights.values())

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        """Return (images, targets): the bytes of a batch's images and targets on the device."""
        example = self._example(rows)
        return rows * example.inputs.bytes, rows * example.targets.bytes

    def _example(self, rows: int) -> Example:
        """Return the shapes and types of a batch in training.

        Mixup and cutmix replace the class of an image by a probability of each class.
        """
        example = self.images.example(rows)
        if self.recipe.augment.together == 1:
            return example
        targets = torch.zeros(1, *example.targets.shape, dtype=example.targets.dtype)
        return replace(example, targets=TensorSpec.of(self.task.shares(targets)))

    # --- Passes of the whole model

    def _whole(self, rows: int, gradients: bool) -> Pass:
        """Return the memory of a pass of the whole model on `rows` images.

        If `gradients` is true, the gradients exist before the pass and do not count. Otherwise the
        pass allocates them, and they count.
        """
        with self._run_fake_pass():
            run = partial(self.in_precision, self.model)
            return self._pass(self.model, run, self._images(rows), gradients, last=True)

    def _pass(
        self,
        module: nn.Module,
        run: Callable[[Tensor], Tensor],
        inputs: Tensor,
        gradients: bool,
        last: bool,
    ) -> Pass:
        targets = self._example(len(inputs)).batch(self.device).targets

        def loss(out: Tensor) -> Tensor:
            return self.task.loss(out.float(), targets) if last else out

        return measure_pass(module, run, inputs, loss, [targets], gradients, self._cpu)

    @contextmanager
    def _run_fake_pass(self) -> Iterator[None]:
        """Run a pass of fake tensors in this block, and turn its error into a RecipeError.

        The usual causes are a model that needs values, and an operator without a meta kernel.
        """
        try:
            with self._fake:
                yield
        except (RuntimeError, AssertionError, ValueError, TypeError, LookupError) as error:
            reason = read_line(error) or type(error).__name__
            raise RecipeError(
                f"model.name={self.recipe.model.name} cannot be planned: its pass needs more than "
                f"shapes ({reason}); training may still work"
            ) from error

    def _images(self, rows: int) -> Tensor:
        example = self._example(rows)
        return example.batch(self.device, channels_last=self.recipe.channels_last).inputs

    def in_precision(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Run a forward pass in the recipe's precision."""
        with autocast(self.device, self.recipe.precision):
            out: Tensor = module(inputs)
        return out

    def forward_flops(self, rows: int) -> int:
        """Count the FLOPs of one forward pass on `rows` images."""
        with self._run_fake_pass():
            return _count_flops(self.model, self._images(rows))[1]

    def unit_sizes(self) -> list[int]:
        """Return the bytes of the parameters of the root, then of each FSDP unit."""
        return compute_unit_sizes(self.model, find_units(self.model))

    # --- Stages of a pipeline

    @cached_property
    def traced(self) -> Traced:
        """The traced model, which can be cut. Raises RecipeError if the model cannot be traced."""
        return trace(self.model, self.recipe.model.name)

    def cut(
        self, layout: Layout, microbatches: int | None = None, costs: Sequence[BlockCost] = ()
    ) -> Cut:
        """Cut the model as the recipe says, or so that the slowest stage is as fast as possible.

        Args:
            layout: workers and schedule.
            microbatches: number of micro-batches. None: the number in the recipe or, if the recipe
                leaves it open, the possible number nearest to `MICROBATCHES` per worker.
            costs: cost of each block. Empty: what `blocks` returns, which is in FLOPs.

        Raises:
            RecipeError: the model cannot be cut like this.
        """
        workers = layout.workers
        virtual = layout.virtual
        recipe_cuts = layout.recipe.pipeline.cuts
        if microbatches is None:
            target = MICROBATCHES * workers
            microbatches = min(layout.microbatches, key=lambda m: (abs(m - target), m))
        rows = -(-layout.rows // microbatches)
        names = choose_cuts(self.traced, recipe_cuts, workers * virtual, costs or self.blocks(rows))
        holders = assign_ranks(layout.schedule, workers, virtual)
        gradients = [0] * workers
        for holder, stage in zip(holders, self.traced.stages(names), strict=True):
            gradients[holder] += self.resident(stage).gradients
        balanced_by = "flops"
        if recipe_cuts != "auto":
            balanced_by = "recipe"
        elif costs:
            balanced_by = "seconds"
        return Cut(
            names=names,
            microbatches=microbatches,
            rows=rows,
            holders=holders,
            stages=self.stages(names, rows, wired=layout.processes > 1),
            gradients=gradients,
            ideal=compute_ideal_bubble(workers, microbatches, virtual),
            balanced_by=balanced_by,
        )

    def staged(self, layout: Layout, cut: Cut | None = None) -> StagedModel:
        """Return the memory of the stages of `cut`, by default of the recipe's cut."""
        if cut is None:
            cut = self.cut(layout)
        return StagedModel(
            residents=list(map(self.resident, self.traced.stages(cut.names))),
            passes=[stage.memory for stage in cut.stages],
            workers=cut.holders,
            orders=list_actions(layout.schedule, layout.workers, layout.virtual, cut.microbatches),
        )

    def blocks(self, rows: int) -> list[BlockCost]:
        """Return the cost of each block, a part of the model between two possible cuts.

        Here `forward` and `backward` of a cost are FLOPs instead of seconds. The backward pass is
        assumed to need twice the FLOPs of the forward pass. `bytes` is the size of the block's
        output; 0 for the last block.
        """
        costs = []
        modules = self.traced.stages(self.traced.cuts)
        with self._run_fake_pass():
            activations = self._images(rows)
            for block in modules:
                run = partial(self.in_precision, block)
                activations, flops = _count_flops(run, activations)
                costs.append(BlockCost(flops, 2 * flops, count_bytes(activations)))
        # The output of the last block goes to the loss and is not sent.
        costs[-1] = replace(costs[-1], bytes=0)
        return costs

    def stages(self, cuts: Sequence[str], rows: int, wired: bool) -> list[StagePass]:
        """Measure the pass of a micro-batch through each stage.

        Args:
            cuts: modules after which the model is cut.
            rows: number of images of the micro-batch.
            wired: whether stages are in different processes, which send contiguous tensors.
        """
        modules = self.traced.stages(cuts)
        passes = []
        with self._run_fake_pass():
            activations = self._images(rows)
            for index, stage in enumerate(modules):
                first = index == 0
                last = index == len(modules) - 1
                run: Callable[[Tensor], Tensor] = partial(self._run_stage, stage)
                if wired:
                    run = Wire(stage, self._run_stage, first, last)
                outputs, flops = _count_flops(run, activations.detach())
                received = 0 if first else count_bytes(activations)
                measured = self._pass(stage, run, activations, gradients=True, last=last)
                measured = measured._replace(received=received)
                passes.append(StagePass(measured, count_bytes(outputs), flops))
                activations = torch.empty_like(outputs).requires_grad_()
        return passes

    def _run_stage(self, stage: nn.Module, inputs: Tensor) -> Tensor:
        run = self.in_precision
        if self.recipe.recompute:
            run = checkpoint_forward(self.in_precision, [stage], random=False)
        return run(stage, inputs)


def _count_flops(run: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, int]:
    """Run a forward pass, and return (outputs, flops)."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = run(inputs)
    return out, int(counter.get_total_flops())


def _is_published(model: ModelRecipe) -> bool:
    """Return whether torchvision or timm publishes the weights that the recipe names.

    If not, `FakeModel` loads the weights as training does, which raises RecipeError for a name that
    nobody publishes.
    """
    if model.weights is None:
        return False
    # timm's names of weights are checked when the model is built.
    if model.name.startswith(TIMM):
        return True
    try:
        return model.weights in torchvision.models.get_model_weights(model.name).__members__
    except ValueError:
        return False

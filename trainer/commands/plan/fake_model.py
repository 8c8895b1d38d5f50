"""A model of shapes alone: what its passes allocate and compute, counted without allocating or computing anything.

Fake tensors run the real operators' shape functions through autograd, as training would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from trainer.commands.plan.dataset_facts import DatasetFacts
from trainer.commands.plan.planned_layout import Layout
from trainer.data import Example, TensorSpec
from trainer.devices.precision import AUTOCAST
from trainer.errors import RecipeError
from trainer.models import memory
from trainer.models.balance import BlockCost, cuts_for
from trainer.models.blocks import hold_statistics
from trainer.models.memory import Pass, Resident, size_of
from trainer.models.partition import Traced, trace
from trainer.models.recompute import anew, recompute, runs_of
from trainer.modes.pipeline.orders import ideal_bubble
from trainer.modes.pipeline.ranks import Wire
from trainer.modes.pipeline.torch_schedules import ranks_of_stages
from trainer.optim.optimizers import build_optimizer, optimizer_state
from trainer.optim.trainable import roles_of
from trainer.recipe import ModelRecipe, Recipe
from trainer.training.teaching import trained_teacher

MICROBATCHES = 4  # for each worker, where the recipe leaves the number open: its bubble is 20 % or less


class StagePass(NamedTuple):
    """A stage's pass of one micro-batch, and what it sends on."""

    memory: Pass
    sent: int  # bytes of its outputs
    flops: int  # of the forward pass


@dataclass(frozen=True)
class Cut:
    """A model in stages."""

    names: tuple[str, ...]  # of the cuts
    microbatches: int  # into which a shard's batch goes
    rows: int  # images of one, of the largest where they differ
    holders: tuple[int, ...]  # which worker holds each stage
    stages: tuple[StagePass, ...]  # each stage's pass of a micro-batch
    gradients: tuple[int, ...]  # bytes of each worker's
    ideal: float  # bubble of equal stages
    balanced_by: str  # what made the cuts: recipe, flops or seconds


class FakeModel:
    """A recipe's model, its weights and gradients without values, on devices of a `kind`, cpu or cuda: without a GPU
    the CPU's operators stand in for its own."""

    def __init__(self, recipe: Recipe, images: DatasetFacts, kind: str, recomputed: int | None = None) -> None:
        self.recipe, self.images, self.task = recipe, images, images.task(recipe)
        self.device = torch.device("cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu")
        self._cpu = kind == "cpu"
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = self._build().train()
        hold_statistics(self.model)
        self.runs = runs_of(self.model)
        if recipe.recompute is True and not recipe.traits.staged:
            recompute(self.model, self.runs[:recomputed], random=False)
        self._roles = roles_of(self.model, recipe)
        self.whole = cache(self._whole)

    def _build(self) -> nn.Module:
        """The model with fake parameters; published weights have its shapes and are not fetched."""
        starting = not _published(self.recipe.model)
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        try:
            with torch.device("meta"):
                model = self.images.model(self.recipe, starting)
        except (NotImplementedError, RuntimeError):  # it computes with values while it is made
            model = self.images.model(self.recipe, starting)
        model = model.to("meta", memory_format=layout)  # type: ignore[call-overload]
        with self._fake:
            fake: nn.Module = model._apply(
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device)
            )
        return fake

    # Weights and what goes with them.

    def resident(self, module: nn.Module) -> Resident:
        """Bytes that the model, or a stage of it, holds from step to step."""
        parameters = dict(module.named_parameters())
        with self._fake:
            optimizer = build_optimizer(parameters, self.recipe.optimizer, self._roles)
            state = size_of(*optimizer_state(optimizer, parameters).values())
        return memory.resident(module, state, self.recipe.ema is not None)

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def teacher(self) -> int:
        """Bytes of distill.teacher's weights; published ones are not fetched. Raises TrainerError."""
        if self.recipe.distill.teacher is None:
            return 0
        inputs, outputs = self.images.example(1).inputs, self.task.outputs() or 0
        return size_of(*trained_teacher(self.recipe, inputs, outputs, starting=False).weights.values())

    def batch_bytes(self, rows: int) -> tuple[int, int]:
        """Of a batch's images and targets on the device."""
        example = self.images.example(rows)
        return rows * example.inputs.bytes, rows * self._targets(example).bytes

    def _targets(self, example: Example) -> TensorSpec:
        """Of a sample in training: shares of the outputs under mixup and cutmix."""
        if self.recipe.augment.together == 1:
            return example.targets
        return TensorSpec.of(self.task.shares(torch.zeros(1, *example.targets.shape, dtype=example.targets.dtype)))

    # Passes.

    def _whole(self, rows: int, gradients: bool) -> Pass:
        """The whole model's pass on so many images. Gradients that do not exist already count as they are made."""
        with self._fake, self._shapes_suffice():
            run = partial(self.in_precision, self.model)
            return self._pass(self.model, run, self._images(rows), gradients, last=True)

    def _pass(
        self, module: nn.Module, run: Callable[[Tensor], Tensor], inputs: Tensor, gradients: bool, last: bool
    ) -> Pass:
        spec, rows = self._targets(self.images.example(len(inputs))), len(inputs)
        targets = torch.zeros(rows, *spec.shape, dtype=spec.dtype, device=self.device)

        def loss(out: Tensor) -> Tensor:
            return self.task.loss(out.float(), targets) if last else out

        return memory.of_module(module, run, inputs, loss, [targets], gradients, self._cpu)

    @contextmanager
    def _shapes_suffice(self) -> Iterator[None]:
        """Raises RecipeError: the model looks at values, or has an operator without a shape function."""
        try:
            yield
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError, LookupError) as error:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise RecipeError(
                f"model.name={self.recipe.model.name} cannot be planned: its pass needs more than shapes ({reason}); "
                "training may still work"
            ) from error

    def _images(self, rows: int) -> Tensor:
        return self.images.example(rows).zeros(self.device, channels_last=self.recipe.channels_last).inputs

    def in_precision(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """A forward pass in the recipe's precision."""
        autocast = AUTOCAST.get(self.recipe.precision)
        with nullcontext() if autocast is None else torch.autocast(self.device.type, autocast):
            out: Tensor = module(inputs)
        return out

    def forward_flops(self, rows: int) -> int:
        """Of one forward pass."""
        with self._fake, self._shapes_suffice():
            return _counted(self.model, self._images(rows))[1]

    # Stages.

    @cached_property
    def traced(self) -> Traced:
        """Raises RecipeError."""
        return trace(self.model, self.recipe.model.name)

    def cut(self, layout: Layout, microbatches: int | None = None, costs: Sequence[BlockCost] = ()) -> Cut:
        """Cut it as the recipe says, or where the slowest stage is fastest, by `costs` of each block or its FLOPs.
        Raises RecipeError."""
        workers, virtual, wanted = layout.workers, layout.virtual, layout.recipe.pipeline.cuts
        if microbatches is None:  # the recipe's number, or of those that can be one near four a worker
            near = MICROBATCHES * workers
            microbatches = min(layout.microbatches, key=lambda m: (abs(m - near), m))
        rows = -(-layout.rows // microbatches)
        names = cuts_for(self.traced, wanted, workers * virtual, costs or self.blocks(rows))
        holders = tuple(ranks_of_stages(layout.schedule, workers, virtual))
        gradients = [0] * workers
        for holder, stage in zip(holders, self.traced.stages(names), strict=True):
            gradients[holder] += self.resident(stage).gradients
        return Cut(
            names,
            microbatches,
            rows,
            holders,
            tuple(self.stages(names, rows, wired=layout.processes > 1)),
            tuple(gradients),
            ideal_bubble(workers, microbatches, virtual),
            "recipe" if wanted != "auto" else "seconds" if costs else "flops",
        )

    def blocks(self, rows: int) -> list[BlockCost]:
        """Each block between neighbouring cuts: forward FLOPs, twice as many backward, and the bytes that go on."""
        costs, modules = [], self.traced.stages(self.traced.cuts)
        with self._fake, self._shapes_suffice():
            travelling = self._images(rows)
            for block in modules:
                travelling, flops = _counted(partial(self.in_precision, block), travelling)
                costs.append(BlockCost(flops, 2 * flops, size_of(travelling)))
        return [*costs[:-1], BlockCost(costs[-1].forward, costs[-1].backward, 0)]

    def stages(self, cuts: Sequence[str], rows: int, wired: bool) -> list[StagePass]:
        """Each stage's pass of a micro-batch; between processes, `wired`, what travels is contiguous."""
        modules, passes = self.traced.stages(cuts), []
        with self._fake, self._shapes_suffice():
            travelling = self._images(rows)
            for index, stage in enumerate(modules):
                first, last = index == 0, index == len(modules) - 1
                run: Callable[[Tensor], Tensor] = partial(self._run_stage, stage)
                if wired:
                    run = Wire(stage, self._run_stage, first, last)
                sent, flops = _counted(run, travelling.detach())
                received = 0 if first else size_of(travelling)
                measured = self._pass(stage, run, travelling, gradients=True, last=last)._replace(received=received)
                passes.append(StagePass(measured, size_of(sent), flops))
                travelling = torch.empty_like(sent).requires_grad_()
        return passes

    def _run_stage(self, stage: nn.Module, inputs: Tensor) -> Tensor:
        run = anew(self.in_precision, [stage], random=False) if self.recipe.recompute else self.in_precision
        out: Tensor = run(stage, inputs)
        return out


def _counted(run: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, int]:
    """The outputs and FLOPs of a forward pass."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = run(inputs)
    return out, int(counter.get_total_flops())


def _published(model: ModelRecipe) -> bool:
    """Whether torchvision has such weights; others are `models.build`'s to refuse."""
    if model.weights is None:
        return False
    try:
        return model.weights in torchvision.models.get_model_weights(model.name).__members__
    except ValueError:
        return False

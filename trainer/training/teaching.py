"""`distill.teacher`: a trained model apart from the one that trains, whose outputs become a part of targets."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
import xxhash
from torch import Tensor

from trainer import tasks
from trainer.data import Batch, Datasets, TensorSpec
from trainer.data.folders.photo_folders import IMAGENET, statistics
from trainer.data.folders.scanning import few
from trainer.devices.precision import AUTOCAST, set_precision
from trainer.errors import RecipeError, TrainerError
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.inputs import with_pretrained_input
from trainer.models.memory import size_of
from trainer.models.zoo import are_names, build
from trainer.modes import Strategy
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import TIMM, torchvision_classifiers
from trainer.saving.run_names import run_named
from trainer.tasks import Task
from trainer.training.randomness import random_states, restore_random_states
from trainer.training.trained import Trained, task_without_loss

IMAGENET_CLASSES = torchvision.models.ResNet18_Weights.DEFAULT.meta["categories"]
FIRST, LAST = "n01440764", "n15075141"  # of its folders, in the same order
WHOLE = ", whole on each device that has outputs"


def trained_teacher(recipe: Recipe, inputs: TensorSpec, outputs: int, starting: bool = True) -> Trained:
    """The recipe's, for a run of such inputs and outputs; fetched where `starting`. Raises TrainerError."""
    word = str(recipe.distill.teacher)
    try:
        if not word.startswith(TIMM) and word not in torchvision_classifiers():
            return Trained.read(run_named(word))
        own = Recipe().replace(model={"name": word, "weights": "DEFAULT"}, data={"name": "imagefolder"})
        own = with_pretrained_input(own.replace(precision=recipe.precision))
        known = (timm_zoo if word.startswith(TIMM) else torchvision_zoo).known_classes(own.model)
        if known != outputs:
            raise RecipeError(f"it knows {known:,} classes, and this run has {outputs}: give a teacher of the same")
        square = len({*inputs.shape[-2:]}) == 1
        size: ImageSize = inputs.shape[-1] if square else (inputs.shape[-2], inputs.shape[-1])
        weights = build(own.model, outputs, inputs.shape[0], size, starting).state_dict()
        mean, std = statistics(tuple(own.data.mean or IMAGENET[0]), tuple(own.data.std or IMAGENET[1]), inputs.shape[0])
        names = IMAGENET_CLASSES if known == len(IMAGENET_CLASSES) else [*map(str, range(known))]
        told = {"classes": names, "mean": mean, "std": std, "channels": len(mean), "image_size": size}
        return Trained(Path(word), weights, {key: json.dumps(value) for key, value in told.items()}, own, own)
    except TrainerError as error:
        raise type(error)(f"distill.teacher={word}: {re.split(', (?:or|and) start ', str(error))[0]}") from None


class Teacher(Task):
    """Answers for each batch of training, in evaluation mode and its own precision; as a task, the loss of both.

    A batch's targets and the teacher's outputs are columns of one tensor, which goes wherever targets go: into shards,
    micro-batches, recorded steps, to the last stage. float32 has all class indices exactly.
    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), section 2.
    """

    def __init__(self, task: Task, data: Datasets, device: torch.device, needed: bool) -> None:
        """Of the task's recipe; its model is `needed` where losses are computed. Raises TrainerError."""
        self.recipe, self.names, self._task, before = task.recipe, task.names, task, random_states([])
        distill, self._outputs = self.recipe.distill, task.outputs() or 0
        trained = trained_teacher(self.recipe, data.inputs, self._outputs)
        facts, own, classes = trained.facts, trained.own, trained.facts.classes or ()
        if [*classes] == IMAGENET_CLASSES and sorted(data.classes) == [FIRST, *data.classes[1:-1], LAST]:
            classes = data.classes
        self._check(trained, classes, data)
        plain, without_loss = None if facts.mean else facts.spec, task_without_loss(own, classes)
        model = trained.model(without_loss, len(classes), facts.channels, facts.image_size, plain).requires_grad_(False)
        restore_random_states(before, [])  # the model that trains begins as it would without a teacher
        values = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in model.state_dict().values()]
        digest = xxhash.xxh3_64_hexdigest(torch.cat(values).numpy().data)
        self.facts = [digest, own.precision, [*facts.mean], [*facts.std]]
        if needed and self.recipe.traits.exchanges != "shards":  # before its mode looks for what is free
            model.to(device)
        self._model = model if needed else None
        self._run: Any = self._model  # or what its mode put in its place
        self.size = size_of(*trained.weights.values()) * needed  # bytes on this rank, where it is whole
        self._precision, self._hard = own.precision, data.targets
        self.targets = TensorSpec((max(1, *data.targets.shape, 1) + self._outputs,), torch.float32)  # of a row
        self._share = 0.5 if distill.weight is None else distill.weight
        self._heat = distill.temperature or 4.0
        self.note = f"{distill.teacher}: {self._share:.0%} of the loss, temperature {self._heat:g}; {own.model.name}, "
        self.note += own.precision + ", classes by their order" * (classes != data.classes) + WHOLE
        self._affine: tuple[Tensor, Tensor] | None = None  # from the run's normalised pixels to its own
        if (facts.mean, facts.std) != (data.mean, data.std):
            pixels = (data.mean, data.std, facts.mean, facts.std)
            mean, std, own_mean, own_std = (torch.tensor(part).double()[:, None, None].to(device) for part in pixels)
            self._affine = (std / own_std).float(), ((mean - own_mean) / own_std).float()

    def _check(self, trained: Trained, known: tuple[str, ...], data: Datasets) -> None:
        word, spec, own = f"distill.teacher={self.recipe.distill.teacher}", trained.facts.spec, trained.own
        if tasks.kind(own).soft_loss is not type(self._task).soft_loss or len(data.targets.shape) > 1:
            told = f"task.name={own.task.name}, and this run has task.name={self.recipe.task.name}"
            raise RecipeError(f"{word} was trained with {told}: give a teacher of the same task")
        other = are_names(known) and are_names(data.classes) and known != data.classes
        if other or len(known) != len(data.classes) or (own.model.num_classes or len(known)) != self._outputs:
            there, here = (f"{len(each)} ({few(each, 8)})" for each in (known, data.classes))
            raise RecipeError(f"{word} knows {there} classes, and this run has {here}: give a teacher of the same")
        if spec != data.inputs:
            size = json.dumps(trained.facts.image_size, separators=(",", ":"))
            words = f": type data.image_size={size} data.channels={spec.shape[0]}" * bool(trained.facts.mean)
            raise RecipeError(f"{word} reads {spec}, and this run's inputs are {data.inputs}{words}")

    def place(self, strategy: Strategy) -> None:
        """Where its mode has it. Collective."""
        if self._model is not None and self._run is self._model:
            self._run = strategy.place_teacher(self._model)
            if self._run is not self._model:
                self.note = f"in shards: {self.note.removesuffix(WHOLE)}"

    @torch.no_grad()
    def teach(self, batch: Batch) -> Batch:
        """The batch with what the teacher says of these very inputs beside its targets, as (N, ...) float32."""
        if self._run is None:
            return batch
        inputs = batch.inputs if self._affine is None else batch.inputs * self._affine[0] + self._affine[1]
        kind, hard = AUTOCAST.get(self._precision), batch.targets
        set_precision(self._precision)
        with nullcontext() if kind is None else torch.autocast(inputs.device.type, kind):
            taught = self._run(inputs)
        set_precision(self.recipe.precision)
        return replace(batch, targets=torch.cat([hard.view(len(hard), -1).float(), taught.float()], 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(1 - distill.weight) x the task's loss + distill.weight x its `soft_loss`: the mean over the rows, 0-dim."""
        hard, taught = targets.tensor_split([targets.shape[1] - self._outputs], 1)
        if not self._hard.shape and hard.shape[1] == 1:  # mixed classes are shares of all
            hard = hard[:, 0].to(self._hard.dtype)
        soft = self._task.soft_loss(outputs, taught, self._heat)
        return (1 - self._share) * self._task.loss(outputs, hard) + self._share * soft

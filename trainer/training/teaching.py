"""The teacher of `distill.teacher`: a trained model whose outputs are a second training target."""

import json
import re
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
from trainer.devices.precision import autocast, set_precision
from trainer.errors import RecipeError, TrainerError
from trainer.memory.measuring import count_bytes
from trainer.models import timm_zoo, torchvision_zoo
from trainer.models.inputs import add_pretrained_input
from trainer.models.zoo import build, check_train_size, match_by_name
from trainer.modes import Strategy
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import TIMM, torchvision_classifiers
from trainer.recipe.text import list_some
from trainer.saving.run_names import find_run
from trainer.saving.tensor_files import view_bytes
from trainer.tasks import Task
from trainer.training.randomness import read_random_states, restore_random_states
from trainer.training.trained import Trained, create_task_without_loss

IMAGENET_CLASSES = torchvision.models.ResNet18_Weights.DEFAULT.meta["categories"]
# The first and the last name of ImageNet's class folders. Sorted by these names, the folders have
# the order of IMAGENET_CLASSES.
FIRST = "n01440764"
LAST = "n15075141"
WHOLE = ", whole on each device that has outputs"


def load_teacher(
    recipe: Recipe, inputs: TensorSpec, outputs: int, starting: bool = True
) -> Trained:
    """Return the weights, the metadata and the recipe of the teacher.

    Args:
        recipe: The recipe of the run.
        inputs: Shape and type of the run's inputs.
        outputs: Number of outputs of the run's model.
        starting: Whether a published model gets its published weights. If False, its weights are
            random.

    Raises:
        TrainerError: There is no such teacher, or a published model has another number of classes
            than `outputs`.
    """
    name = str(recipe.distill.teacher)
    is_timm = name.startswith(TIMM)
    try:
        if not is_timm and name not in torchvision_classifiers():
            # A recipe means the same weights whenever it runs, also for runs of earlier versions,
            # so a teacher's last weights are read unless its best are named.
            return Trained.read(find_run(name), prefers_best=False)
        own = Recipe().replace(
            model={"name": name, "weights": "DEFAULT"}, data={"name": "imagefolder"}
        )
        own = add_pretrained_input(own.replace(precision=recipe.precision))
        zoo = timm_zoo if is_timm else torchvision_zoo
        class_count = zoo.count_classes(own.model)
        if class_count != outputs:
            raise RecipeError(
                f"it knows {class_count:,} classes, and this run has {outputs}: choose a teacher "
                "with the same classes"
            )
        channels = inputs.shape[0]
        sides = inputs.shape[-2:]
        size: ImageSize = sides[-1]
        if len({*sides}) > 1:
            size = sides[0], sides[1]
        weights = build(own.model, outputs, channels, size, starting).state_dict()
        mean = statistics(own.data.mean or IMAGENET[0], channels)
        std = statistics(own.data.std or IMAGENET[1], channels)
        classes = [*map(str, range(class_count))]
        if class_count == len(IMAGENET_CLASSES):
            classes = IMAGENET_CLASSES
        metadata = {
            "classes": json.dumps(classes),
            "mean": json.dumps(mean),
            "std": json.dumps(std),
            "channels": json.dumps(len(mean)),
            "image_size": json.dumps(size),
        }
        return Trained(Path(name), weights, metadata, own, own)
    except TrainerError as error:
        # The end of a message about weights suggests other start weights. This is cut off, because
        # it concerns the model that trains, not the teacher.
        message = re.split(", (?:or|and) start ", str(error))[0]
        raise type(error)(f"distill.teacher={name}: {message}") from None


class Teacher(Task):
    """The teacher, and a task whose loss combines the run's own loss with the teacher's outputs.

    The teacher runs on each training batch in evaluation mode and in its own precision. The targets
    of a batch and the teacher's outputs are columns of one tensor, which is passed wherever targets
    are passed: to ranks, micro-batches, captured steps and the last pipeline stage. Its type is
    float32, which represents all class indices exactly.

    Reference: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network"
    (arXiv:1503.02531), section 2.
    """

    def __init__(self, task: Task, data: Datasets, device: torch.device, needed: bool) -> None:
        """Load the teacher of the task's recipe.

        Args:
            task: The task of the run.
            data: The data of the run.
            device: The main device.
            needed: Whether this rank computes losses, and thus needs the teacher's model.

        Raises:
            TrainerError: There is no such teacher, or it does not fit the run.
        """
        self.recipe = task.recipe
        self.names = task.names
        self._task = task
        states = read_random_states()
        distill = self.recipe.distill
        self._outputs = task.outputs() or 0
        trained = load_teacher(self.recipe, data.inputs, self._outputs)
        facts = trained.facts
        own = trained.own
        classes = facts.classes or ()
        # ImageNet's class folders have names such as n01440764. Sorted, they have the order of the
        # published class names, so these are replaced by the names of the folders.
        imagenet_folders = [FIRST, *data.classes[1:-1], LAST]
        if [*classes] == IMAGENET_CLASSES and sorted(data.classes) == imagenet_folders:
            classes = data.classes
        self._check(trained, classes, data)
        matches = match_by_name(classes, data.classes)
        # Indices of the teacher's outputs in the order of this run's classes. None if the order is
        # the same, or if the classes cannot be matched by their names.
        self._order: Tensor | None = None
        if matches is not None and classes != data.classes:
            others = range(len(classes), self._outputs)
            self._order = torch.tensor([*matches, *others], device=device)
        plain = None if facts.mean else facts.spec
        without_loss = create_task_without_loss(own, classes)
        model = trained.model(without_loss, facts.channels, facts.image_size, plain).requires_grad_(
            False
        )
        if data.train_size:
            key = f"distill.teacher={distill.teacher}"
            check_train_size(model, key, data.channels, data.train_size)
        # The model that trains starts from the same random numbers as without a teacher.
        restore_random_states(states)
        tensors = model.state_dict().values()
        digest = xxhash.xxh3_64_hexdigest(b"".join(map(view_bytes, tensors)))
        self.facts = [digest, own.precision, [*facts.mean], [*facts.std]]
        # A teacher that the mode does not shard moves to the device now: the mode measures free
        # memory later, and must not count the teacher's memory as free.
        if needed and self.recipe.traits.exchanges != "shards":
            model.to(device)
        self._model = model if needed else None
        # The teacher's model, or the wrapper that the mode puts around it in `place`. None if this
        # rank does not need the teacher.
        self._run: Any = self._model
        # Size of the teacher's weights in bytes. 0 if this rank does not need the teacher.
        self.size = 0
        if needed:
            self.size = count_bytes(*trained.weights.values())
        self._precision = own.precision
        self._target_spec = data.targets
        # Shape and type of one row of the combined targets.
        columns = max(1, *data.targets.shape, 1) + self._outputs
        self.targets = TensorSpec((columns,), torch.float32)
        self._weight = 0.5 if distill.weight is None else distill.weight
        self._temperature = distill.temperature or 4.0
        self.note = (
            f"{distill.teacher}: {self._weight:.0%} of the loss, temperature "
            f"{self._temperature:g}; {own.model.name}, {own.precision}"
        )
        if matches is None and classes != data.classes:
            self.note += ", classes matched by their order"
        self.note += WHOLE
        # Factor and offset that convert the run's normalized pixels to those of the teacher. None
        # if both normalize pixels by the same mean and std.
        self._affine: tuple[Tensor, Tensor] | None = None
        if (facts.mean, facts.std) != (data.mean, data.std):
            mean, std, own_mean, own_std = (
                torch.tensor(values).double()[:, None, None]
                for values in (data.mean, data.std, facts.mean, facts.std)
            )
            factor = (std / own_std).float().to(device)
            offset = ((mean - own_mean) / own_std).float().to(device)
            self._affine = factor, offset

    def _check(self, trained: Trained, classes: tuple[str, ...], data: Datasets) -> None:
        option = f"distill.teacher={self.recipe.distill.teacher}"
        spec = trained.facts.spec
        own = trained.own
        has_other_loss = tasks.find_task_class(own).soft_loss is not type(self._task).soft_loss
        if has_other_loss or len(data.targets.shape) > 1:
            raise RecipeError(
                f"{option} was trained with task.name={own.task.name}, and this run has "
                f"task.name={self.recipe.task.name}: choose a teacher of the same task"
            )
        matches = match_by_name(classes, data.classes)
        has_unmatched = (
            matches is not None and classes != data.classes and {*matches} != {*range(len(classes))}
        )
        if (
            has_unmatched
            or len(classes) != len(data.classes)
            or (own.model.num_classes or len(classes)) != self._outputs
        ):
            raise RecipeError(
                f"{option} knows {len(classes)} ({list_some(classes, 8)}) classes, and this run "
                f"has {len(data.classes)} ({list_some(data.classes, 8)}): choose a teacher with "
                "the same"
            )
        if spec != data.inputs:
            remedy = ""
            if trained.facts.mean:
                size = json.dumps(trained.facts.image_size, separators=(",", ":"))
                remedy = f": type data.image_size={size} data.channels={spec.shape[0]}"
            raise RecipeError(
                f"{option} reads {spec}, and this run's inputs are {data.inputs}{remedy}"
            )

    def place(self, strategy: Strategy) -> None:
        """Let the mode put the teacher on this rank's device, whole or in shards. Collective."""
        if self._model is not None and self._run is self._model:
            self._run = strategy.place_teacher(self._model)
            if self._run is not self._model:
                self.note = f"in shards: {self.note.removesuffix(WHOLE)}"

    @torch.no_grad()
    def teach(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's outputs appended to its targets.

        The new targets are (N, columns) float32. The teacher sees the same augmented inputs as the
        model. A rank that computes no loss gets the batch back unchanged.
        """
        if self._run is None:
            return batch
        inputs = batch.inputs
        if self._affine is not None:
            factor, offset = self._affine
            inputs = inputs * factor + offset
        set_precision(self._precision)
        with autocast(inputs.device, self._precision):
            outputs = self._run(inputs)
        set_precision(self.recipe.precision)
        if self._order is not None:
            outputs = outputs[:, self._order]
        hard = batch.targets.view(len(batch.targets), -1).float()
        targets = torch.cat([hard, outputs.float()], 1)
        return replace(batch, targets=targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the rows, as a scalar tensor.

        The loss is (1 - distill.weight) x the task's loss + distill.weight x its `soft_loss`.
        """
        target_columns = targets.shape[1] - self._outputs
        hard, soft = targets.tensor_split([target_columns], 1)
        # A single column of classes becomes (N,) integers again. Mixed classes have a column for
        # each class, and stay as they are.
        if not self._target_spec.shape and hard.shape[1] == 1:
            hard = hard[:, 0].to(self._target_spec.dtype)
        soft_loss = self._task.soft_loss(outputs, soft, self._temperature)
        hard_loss = self._task.loss(outputs, hard)
        return (1 - self._weight) * hard_loss + self._weight * soft_loss

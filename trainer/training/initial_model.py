"""The model as training begins with it, on the CPU: made from its recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from trainer import tasks
from trainer.data import Datasets, Example, TensorSpec
from trainer.data.feeds import known_labels
from trainer.data.photos.decoding import reason
from trainer.data.photos.photo_reader import private_draws
from trainer.errors import RecipeError
from trainer.models.shapes import built_on_meta, description
from trainer.models.zoo import build, colour_filters, fitted, known_classes
from trainer.processes.world import DATA_PATIENCE, World
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import AUXILIARY
from trainer.saving.checkpoint import State
from trainer.saving.run_names import run_named
from trainer.saving.weights import read_weights
from trainer.tasks import Task
from trainer.training.randomness import random_states, restore_random_states


def initial_model(
    recipe: Recipe, task: Task, data: Datasets, state: State | None, world: World, say: Callable[[str], None]
) -> nn.Module:
    """The model as training begins with it, or for the weights of a checkpoint, which its mode scatters. Collective.

    Where weights are sharded it is rank 0's, and has no values on the others: the mode gives them.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    divided = world.size > 1 or recipe.pieces > 1 or recipe.traits.micro_batches
    tell = say if divided and world.is_main else None

    def make(starting: bool = state is None, checked: bool = False) -> nn.Module:
        model = model_of(recipe, task, data, starting)
        if state is not None:
            fitted(model, state.part("model"), "the checkpoint", whole=True)
        if checked:
            check_task(task, model, data, tell)
        return model

    if recipe.traits.exchanges == "shards" and world.size > 1:
        return _whole_on_rank_0(lambda: make(checked=True), lambda: make(False), recipe.model.name, world, say)
    model = make()
    broadcast_weights(model, recipe.model.name, world, say)
    check_task(task, model, data, tell)
    return model


def _whole_on_rank_0(
    make: Callable[[], nn.Module], alike: Callable[[], nn.Module], name: str, world: World, say: Callable[[str], None]
) -> nn.Module:
    """What `make` gives on rank 0; elsewhere the same from `alike`, on the meta device. Collective.

    A model that cannot be built there is built whole on every rank.
    """
    before = random_states([])
    model, reason = world.all_or_none(lambda: (make(), "") if world.is_main else built_on_meta(alike), DATA_PATIENCE)
    digest = description(model) if model is not None else ""
    if digest != world.broadcast_object(digest) and model is not None:
        model, reason = None, "without values it is another model"
    elif model is not None and not world.is_main and not any(tensor.is_meta for tensor in model.parameters()):
        reason = "it was given as a module: give the function or class that makes it"
    reason = next(filter(None, world.wait_for(reason, DATA_PATIENCE)), "")
    if reason:
        say(f"model.name={name} is built whole by each rank of a machine, which takes memory for each: {reason}")
    if model is None:
        restore_random_states(before, [])
        model = alike()
    return model


def model_of(recipe: Recipe, task: Task, data: Datasets, starting: bool = True) -> nn.Module:
    """The recipe's model for a data set, on the CPU; `starting` gives it the weights that the recipe starts from."""
    sizes = len(data.classes), data.channels, data.image_size
    return model_for(recipe, task, *sizes, data.plain, starting, data.classes)


def model_for(
    recipe: Recipe,
    task: Task,
    names: int,
    channels: int,
    image_size: ImageSize,
    plain: TensorSpec | None = None,
    starting: bool = True,
    classes: Sequence[str] = (),
) -> nn.Module:
    """The same for a data set of which only so much is known; `plain` are inputs that are no images."""
    few = Example(2, plain).zeros(torch.device("cpu")).inputs if plain else None
    return build(recipe.model, max(1, names), channels, image_size, starting, few, task.outputs() is None, classes)


def broadcast_weights(model: nn.Module, name: str, world: World, say: Callable[[str], None]) -> None:
    """Rank 0's weights on every rank: not all that models draw comes from the seeded generators.

    Raises:
        RecipeError: they have other shapes.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())} if world.size > 1 else {}
    shapes, digest = {key: tensor.shape for key, tensor in tensors.items()}, xxhash.xxh3_64()
    other = shapes != world.broadcast_object(shapes)
    world.raise_any(RecipeError(f"model.name={name} has other shapes on each rank: seed its draws") if other else None)
    for tensor in tensors.values():
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    apart = digest.digest() != world.broadcast_object(digest.digest())
    if world.max_(torch.tensor(float(apart))).item():
        say(f"model.name={name} begins with rank 0's weights: each rank drew its own, without a seed")
        for tensor in tensors.values():
            tensor.detach().copy_(world.broadcast_(tensor.detach().clone(memory_format=torch.contiguous_format)))


def check_task(task: Task, model: nn.Module, data: Datasets, tell: Callable[[str], None] | None) -> None:
    """Try a user's task on two samples of zeros, before an epoch is spent; `tell` what dividing a batch would change.

    Raises:
        RecipeError: it fails, or lacks a metric that it names.
    """
    if type(task) in tasks.SHIPPED:
        return
    name, two = task.recipe.task.name, data.example(2).zeros(torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(two.inputs).float()
            sums = task.sums(outputs, two.targets)
            keys = task.metrics({key: part.double() for key, part in sums.items()}, 2).keys()
    except ArithmeticError:  # figures of nothing
        return
    except Exception as error:  # a user's task may raise anything at all
        what = f"{type(error).__name__}: {reason(error)}"
        raise RecipeError(f"task.name={name} fails on two samples of zeros ({what})") from error
    finally:
        model.train()
    if absent := set(task.metric_names()) - keys:
        raise RecipeError(f"task.name={name}: its metrics are {', '.join(keys)}, without {', '.join(sorted(absent))}")
    if tell is not None and not _is_a_mean(task, outputs, data):
        tell(
            f"WARNING: the loss of task.name={name} is not the mean of its samples' own losses (as with ignore_index, "
            "or weights that their sum divides). So it is another loss wherever a batch is divided: over ranks, by "
            "accumulate, into micro-batches. reduction='none' and .mean() would make it such a mean"
        )


def _is_a_mean(task: Task, outputs: Tensor, data: Datasets) -> bool:
    """Whether the loss of a batch is that of two parts of it, by their samples: for random outputs of this shape, and
    targets from all over the training set. What cannot be tried is taken for one."""
    few, count = 2, 7  # samples of one part of a batch, and of both
    with suppress(Exception), private_draws(), torch.no_grad():  # a user's task, or data set, may raise anything at all
        train: Any = data.train
        targets, some = known_labels(train, skip=False), range(0, len(train), len(train) // count)[:count]
        if targets is None:
            targets = torch.stack([torch.as_tensor(train.read(n, data.channels)[1]) for n in some])
        else:
            targets = targets[[n % len(targets) for n in some]]
        made = torch.randn(count, *outputs.shape[1:], generator=torch.Generator().manual_seed(0))
        rows = slice(count), slice(few), slice(few, count)
        whole, first, second = (task.loss(made[part], targets[part]).item() for part in rows)
        parts = (few * first + (count - few) * second) / count
        return not math.isfinite(whole) or math.isclose(whole, parts, rel_tol=1e-3)
    return True


def starting_notes(recipe: Recipe, data: Datasets, model: nn.Module) -> dict[str, str]:
    """The banner's lines of weights that training starts from."""
    source, names, lines = recipe.model.init_from, data.classes, dict[str, str]()
    others = data.channels != 3
    adapts = others and source and colour_filters(read_weights(run_named(source))[0], model, data.channels)
    if adapts or (others and recipe.model.weights is not None):
        lines["filters"] = (
            f"of the first layer, for colour, are {'summed' if data.channels == 1 else 'repeated in turn'}"
        )
    if source is None:
        return lines
    known = known_classes(recipe.model, names, model)
    lines["start"] = f"from {source}" + f", which knows {known} of these {len(names)} by name" * (known is not None)
    if recipe.model.name in AUXILIARY:  # what tensors do not tell
        without = "without transform_input, which model.weights=IMAGENET1K_V1 sets"
        lines["inputs"] = "with transform_input" if recipe.model.weights else without
    return lines

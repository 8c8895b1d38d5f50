"""The model as training begins with it, on the CPU: made from its recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer import tasks
from trainer.data import Datasets, Example, TensorSpec
from trainer.data.photos.decoding import reason
from trainer.errors import RecipeError
from trainer.models.given import Given
from trainer.models.zoo import build, fitted, known_classes, registered_model
from trainer.processes.world import World
from trainer.recipe import Recipe
from trainer.saving.checkpoint import State
from trainer.tasks import Task


def initial_model(recipe: Recipe, task: Task, data: Datasets, state: State | None, world: World) -> nn.Module:
    """The model as training begins with it, or for the weights of a checkpoint, which its mode scatters. Collective.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    model = model_of(recipe, task, data, starting=state is None)
    if state is not None:
        fitted(model, state.tensors["model"], "the checkpoint", whole=True)
    elif isinstance(registered_model(recipe.model.name), Given):
        broadcast_weights(model, world)
    check_task(task, model, data)
    return model


def model_of(recipe: Recipe, task: Task, data: Datasets, starting: bool = True) -> nn.Module:
    """The recipe's model for a data set, on the CPU; `starting` gives it the weights that the recipe starts from."""
    names = data.classes
    return model_for(recipe, task, len(names), data.channels, data.image_size, data.plain, starting, names)


def model_for(
    recipe: Recipe,
    task: Task,
    names: int,
    channels: int,
    image_size: int,
    plain: TensorSpec | None = None,
    starting: bool = True,
    classes: Sequence[str] = (),
) -> nn.Module:
    """The same for a data set of which only so much is known; `plain` are inputs that are no images."""
    few = Example(2, plain).zeros(torch.device("cpu")).inputs if plain else None
    return build(recipe.model, max(1, names), channels, image_size, starting, few, task.outputs() is None, classes)


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Rank 0's weights on every rank: a program that torchrun runs may have drawn its own on each."""
    for tensor in [*model.parameters(), *model.buffers()] if world.size > 1 else []:
        tensor.detach().copy_(world.broadcast_(tensor.detach().contiguous()))


def check_task(task: Task, model: nn.Module, data: Datasets) -> None:
    """Try a user's task on two samples of zeros, before an epoch is spent.

    Raises:
        RecipeError: it fails, or lacks a metric that it names.
    """
    if type(task) in tasks.SHIPPED:
        return
    name, two = task.recipe.task.name, data.example(2).zeros(torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            sums = task.sums(model(two.inputs).float(), two.targets)
            keys = task.metrics({key: part.double() for key, part in sums.items()}, 2).keys()
    except ArithmeticError:  # figures of nothing
        return
    except Exception as error:  # a user's task may raise anything at all
        raise RecipeError(
            f"task.name={name} fails on two samples of zeros ({type(error).__name__}: {reason(error)})"
        ) from error
    finally:
        model.train()
    absent = set(task.metric_names()) - keys
    if absent:
        raise RecipeError(f"task.name={name}: its metrics are {', '.join(keys)}, without {', '.join(sorted(absent))}")


def starting_notes(recipe: Recipe, data: Datasets, model: nn.Module) -> dict[str, str]:
    """The banner's line of weights that training starts from."""
    source, names = recipe.model.init_from, data.classes
    if source is None:
        return {}
    known = known_classes(recipe.model, names, model)
    if known is None:
        return {"start": f"from {source}"}
    new = "" if known == len(names) else "; the outputs of the others begin anew"
    return {"start": f"from {source}, which knows {known} of these {len(names)} by name{new}"}

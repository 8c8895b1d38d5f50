"""The initial model on the CPU, built from the recipe, and its start weights."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from trainer import tasks
from trainer.data import Datasets, Example, TensorSpec
from trainer.data.feeds import find_labels
from trainer.data.photos.photo_reader import evaluation_shorter_side, private_draws
from trainer.distributed.world import World
from trainer.errors import RecipeError, describe
from trainer.models.reachable import find_doubts
from trainer.models.shapes import build_on_meta, compute_digest
from trainer.models.undisturbed import restore_after
from trainer.models.zoo import (
    build,
    check_train_size,
    describe_class_match,
    find_color_filters,
    select_fitting_weights,
)
from trainer.modes.flattening import apply_collective
from trainer.processes.terminal import Say
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import ImageSize
from trainer.recipe.known_names import AUXILIARY, OWN_PHOTOS
from trainer.recipe.metric_table import needs_scores
from trainer.recipe.recipe_files import format_argument
from trainer.saving.checkpoint import State
from trainer.saving.run_names import find_run
from trainer.saving.tensor_files import view_bytes
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks import Task
from trainer.tasks.metrics import compute
from trainer.training.randomness import read_random_states, restore_random_states


def build_initial_model(
    recipe: Recipe,
    task: Task,
    data: Datasets,
    state: State | None,
    world: World,
    say: Say,
) -> nn.Module:
    """Build the model, with its start weights unless a checkpoint will be restored. Collective.

    If the mode shards the weights and the model can be built on the meta device, only rank 0's
    model has values. The mode copies them to the other ranks.

    Args:
        recipe: The recipe.
        task: The task.
        data: The data sets, which determine the sizes of inputs and outputs.
        state: The checkpoint that will be restored, if any.
        world: The ranks.
        say: Prints a warning.

    Raises:
        CheckpointError: The checkpoint belongs to another model.
        RecipeError: The user's task fails, or the model has other shapes on another rank.
    """
    is_divided = world.size > 1 or recipe.pieces > 1 or recipe.traits.micro_batches
    warn = say if is_divided and world.is_main else None

    def make(starting: bool = state is None, checked: bool = False) -> nn.Module:
        model = build_for_dataset(recipe, task, data, starting)
        if state:
            select_fitting_weights(model, state.part("model"), "the checkpoint", whole=True)
        if checked:
            check_task(task, model, data, warn)
        return model

    if recipe.traits.exchanges == "shards" and world.size > 1:
        model = _build_whole_on_rank_0(make, recipe.model.name, world, say)
    else:
        model = make()
        broadcast_weights(model, recipe.model.name, world, say)
        check_task(task, model, data, warn)
    if world.is_main:
        for doubt in find_doubts(model):
            say(f"WARNING: model.name={recipe.model.name}: {doubt}")
    return model


def _build_whole_on_rank_0(
    make: Callable[..., nn.Module], name: str, world: World, say: Say
) -> nn.Module:
    """Build the model with `make` on rank 0, and without values on the other ranks. Collective.

    Rank 0 calls `make(checked=True)`. The other ranks call `make(starting=False)` on the meta
    device. If the model cannot be built there, or has other modules or shapes than rank 0's, the
    rank calls this again on the CPU.
    """
    states = read_random_states()

    def make_on_rank() -> tuple[nn.Module | None, str]:
        if world.is_main:
            return make(checked=True), ""
        return build_on_meta(lambda: make(starting=False))

    model, reason = world.all_or_none(make_on_rank)
    digest = compute_digest(model) if model is not None else ""
    is_different = digest != world.broadcast_object(digest)
    if model is not None and is_different:
        model = None
        reason = "without values it is another model"
    elif (
        model is not None
        and not world.is_main
        and not any(tensor.is_meta for tensor in model.parameters())
    ):
        reason = "it was given as a module: give the function or class that makes it"
    reason = next(filter(None, world.wait_for(reason)), "")
    if reason:
        say(
            f"model.name={name} is built whole by each rank of a machine, which needs memory for "
            f"every rank: {reason}"
        )
    if model is None:
        restore_random_states(states)
        model = make(starting=False)
    return model


def build_for_dataset(
    recipe: Recipe, task: Task, data: Datasets, starting: bool = True
) -> nn.Module:
    """Return the recipe's model for a data set, on the CPU.

    If `starting`, the model has the weights from which the recipe starts, otherwise random ones.
    """
    return build_for_sizes(
        recipe,
        task,
        data.channels,
        data.image_size,
        data.plain,
        starting,
        data.train_size,
        data.classes,
    )


def build_for_sizes(
    recipe: Recipe,
    task: Task,
    channels: int,
    image_size: ImageSize,
    plain: TensorSpec | None,
    starting: bool,
    train_size: ImageSize | None = None,
    classes: Sequence[str] = (),
) -> nn.Module:
    """Return the recipe's model for inputs and outputs of known sizes, on the CPU.

    Args:
        recipe: The recipe.
        task: The task, which names the classes or values, and may set the number of outputs.
        channels: Number of channels of an image.
        image_size: Size of an image in pixels.
        plain: Shape and type of inputs that are not images. None for images.
        starting: Whether to load the weights that the recipe starts from.
        train_size: Size of the training images in pixels, if it differs.
        classes: Names of the classes, to match start weights of the last layer.
    """
    inputs = None
    if plain:
        inputs = Example(2, plain).batch(torch.device("cpu")).inputs
    model = build(
        recipe.model,
        max(1, len(task.names)),
        channels,
        image_size,
        starting,
        inputs,
        task.outputs() is None,
        classes,
    )
    if train_size:
        check_train_size(model, f"model.name={recipe.model.name}", channels, train_size)
    return model


def broadcast_weights(model: nn.Module, name: str, world: World, say: Say) -> None:
    """Copy rank 0's weights and buffers to every rank, if those of any rank differ. Collective.

    Each rank builds the model from the same seed. The weights still differ from rank to rank if the
    model uses a random generator that is not seeded.

    Raises:
        RecipeError: The weights of the ranks have different shapes.
    """
    tensors = {}
    if world.size > 1:
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    error = None
    if shapes != world.broadcast_object(shapes):
        error = RecipeError(
            f"model.name={name} has different shapes on different ranks: seed its random numbers"
        )
    world.raise_any(error)
    digest = xxhash.xxh3_64()
    for tensor in tensors.values():
        digest.update(view_bytes(tensor))
    is_different = digest.digest() != world.broadcast_object(digest.digest())
    if world.is_any(is_different):
        say(
            f"model.name={name} begins with rank 0's weights: each rank drew different ones, "
            "because the model does not use the seeded generators"
        )
        apply_collective(map(Tensor.detach, tensors.values()), world.broadcast_)


def check_task(task: Task, model: nn.Module, data: Datasets, warn: Say | None) -> None:
    """Run a user's task on two random samples, so that its errors show before an epoch is trained.

    `warn` is called if the loss of a divided batch differs from that of the whole batch. If `warn`
    is None, these losses are not compared.

    Raises:
        RecipeError: The task fails, or does not compute a metric that it names.
    """
    if type(task) in tasks.SHIPPED:
        return
    name = task.recipe.task.name
    batch = data.example(2).batch(torch.device("cpu"))
    try:
        with restore_after([model]), torch.no_grad():
            outputs = model.eval()(batch.inputs).float()
            sums = task.sums(outputs, batch.targets)
            doubles = {key: part.double() for key, part in sums.items()}
            keys = task.metrics(doubles, 2).keys()
            inputs = task.build_metric_inputs(doubles, 2)
            # The samples may all be of one class, which metrics of outputs may refuse.
            from_sums = [name for name in task.measured if not needs_scores(name)]
            compute(from_sums, inputs)
    # Metrics of two samples may divide by zero, because some classes have no sample. Then the
    # remaining checks are skipped.
    except ArithmeticError:
        return
    except RecipeError:
        raise
    # A user's task may raise any error, which becomes a RecipeError that names the task.
    except Exception as error:
        reason = describe(error)
        raise RecipeError(f"task.name={name} fails on two made-up samples ({reason})") from error
    if missing := set(task.metric_names()) - keys:
        raise RecipeError(
            f"task.name={name}: its metrics are {', '.join(keys)}, without "
            f"{', '.join(sorted(missing))}"
        )
    if warn and not _is_loss_a_mean(task, outputs, data):
        warn(
            f"WARNING: the loss of task.name={name} is not the mean of its samples' own losses (as "
            "with ignore_index, or weights that their sum divides). So the loss changes if a "
            "batch is divided: over ranks, by accumulate, into micro-batches. Use reduction='none' "
            "and .mean()"
        )


def _is_loss_a_mean(task: Task, outputs: Tensor, data: Datasets) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its parts, weighted by size.

    The loss is computed from random outputs in the shape of `outputs`, and from targets of samples
    that are evenly spaced in the training set. The result is True if the loss is not finite or
    cannot be computed.
    """
    # Numbers of samples in the first part and in the whole batch.
    few = 2
    count = 7
    # A user's task or data set may raise any error. Then the loss cannot be checked.
    with suppress(Exception), private_draws(), torch.no_grad():
        train: Any = data.train
        targets = find_labels(train, skip=False)
        samples = range(0, len(train), len(train) // count)[:count]
        if targets is None:
            read = [train.read(n, data.channels)[1] for n in samples]
            targets = torch.stack([torch.as_tensor(target) for target in read])
        else:
            targets = targets[[n % len(targets) for n in samples]]
        generator = torch.Generator().manual_seed(0)
        random_outputs = torch.randn(count, *outputs.shape[1:], generator=generator)
        whole = task.loss(random_outputs, targets).item()
        first = task.loss(random_outputs[:few], targets[:few]).item()
        second = task.loss(random_outputs[few:], targets[few:]).item()
        mean = (few * first + (count - few) * second) / count
        return not math.isfinite(whole) or math.isclose(whole, mean, rel_tol=1e-3)
    return True


def describe_start(recipe: Recipe, data: Datasets, model: nn.Module) -> dict[str, str]:
    """Return the banner's lines about the weights that training starts from, by title."""
    source = recipe.model.init_from
    lines = dict[str, str]()
    if data.channels != 3:
        adapts_filters = recipe.model.weights is not None
        if source:
            weights, _ = read_weights(find_run(source))
            if find_color_filters(weights, model, data.channels):
                adapts_filters = True
        if adapts_filters:
            change = "summed" if data.channels == 1 else "repeated in turn"
            lines["filters"] = f"of the first layer, for colour, are {change}"
    if source is None:
        return lines
    metadata = read_metadata(find_run(source))
    same_size = metadata.get("image_size") == json.dumps(data.image_size)
    preparation = []
    if recipe.data.name in OWN_PHOTOS and same_size:
        present = {
            "data.interpolation": ("interpolation", data.interpolation),
            "data.resize": ("shorter_side", evaluation_shorter_side(data)),
        }
        for key, (name, value) in present.items():
            stored = metadata.get(name)
            # The file of another program may have such entries, but not as JSON.
            with suppress(ValueError):
                if stored is not None and stored != json.dumps(value):
                    preparation.append(format_argument(key, json.loads(stored)))
    class_match = describe_class_match(metadata, recipe.model, data.classes, model)
    lines["start"] = f"from {source}{class_match}"
    if preparation:
        lines["start"] += f"; {' '.join(preparation)} prepares images as for those weights"
    # The file of weights does not record whether the model transforms its inputs. So a line names
    # this run's setting, which the user can compare with that of the run in `source`.
    if recipe.model.name in AUXILIARY:
        if recipe.model.weights:
            lines["inputs"] = "with transform_input"
        else:
            lines["inputs"] = "without transform_input, which model.weights=IMAGENET1K_V1 sets"
    return lines

"""Putting a run together: data -> model -> mode -> optimizer, for training, evaluating and measuring alike."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from trainer import modes, tasks
from trainer.data import Datasets, Example, Loader, Shard, TensorSpec, open_datasets, steps_per_epoch
from trainer.data.cache import cached
from trainer.data.feeds import labels_at_hand
from trainer.data.folders.splits import SPLIT_FILE, continued
from trainer.data.photos import contact_sheet
from trainer.data.photos.decoding import reason
from trainer.devices.precision import has_bf16, set_precision
from trainer.errors import RecipeError, TrainerError
from trainer.models.given import Given
from trainer.models.inputs import with_own_input
from trainer.models.norms import check_alone
from trainer.models.zoo import build, initialise, known_classes, registered_model
from trainer.modes import Context, Strategy
from trainer.optim.optimization import MovingAverage, Updater, loss_scaler, total_steps
from trainer.optim.optimizers import build_optimizer
from trainer.optim.trainable import normalises_batches, notes, roles_of
from trainer.processes import stacks
from trainer.processes.allocation import keep_freed_memory
from trainer.processes.interrupts import Interrupts
from trainer.processes.world import World, locate
from trainer.recipe import Recipe
from trainer.saving.checkpoint import State
from trainer.saving.run_folder import RunFolder, as_before
from trainer.tasks import Task
from trainer.telemetry.clocks import StepTimer
from trainer.telemetry.flops import forward_flops, peak_flops
from trainer.telemetry.tracking import NullTracker, Tracker
from trainer.training import banner, presenting, resuming
from trainer.training.callbacks import Callbacks
from trainer.training.randomness import seed_everything, seed_ranks
from trainer.training.run import WORKERS, Run
from trainer.training.same_images import check_same_images, known_again
from trainer.training.speed_test import speed_recipe


def prepare(recipe: Recipe, interrupts: Interrupts, closing: ExitStack, callbacks: Callbacks) -> Run:
    """Everything before the first step, in the order in which it can fail: what needs no peers comes first."""
    begun = time.perf_counter()
    start_process(recipe)
    recipe = with_own_input(as_before(recipe))
    data = open_datasets(recipe, continued(recipe))
    if "images" in data.notes:  # a look at them chose: from here on the recipe says so
        recipe = recipe.replace(data__image_size=data.image_size, data__channels=data.channels)
    task = task_of(recipe, data)
    world = locate(recipe)
    shard = modes.share(recipe, world)
    steps = steps_per_epoch(len(data.train), recipe, shard)
    world.connect(recipe.timeout)
    tracker = claimed(recipe, world)  # not before the ranks have met: one that waits for them keeps no other run out
    closing.callback(tracker.close)
    closing.callback(callbacks.close)
    callbacks.connect(world)
    check_same_images(world, data)
    state = resuming.newest(tracker, world, recipe)
    samples, resized = known_again(world, data, state)
    data, recipe = cached(replace(data, sources=()), recipe, world, tracker.say, closing)
    tracker.settle(recipe)
    model = begun_model(recipe, task, data, state, world)
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        recipe = speed_recipe(recipe, model, data, world, tracker.say)
    known = world.share(tracker.known())
    size = sum(parameter.numel() for parameter in model.parameters())
    batch_norm = normalises_batches(model, recipe)
    cards = cards_of(world, recipe.precision)
    peak, flops = utilisation_base(model, data, cards)
    context = Context(
        recipe=recipe,
        world=world,
        task=task,
        example=data.example(recipe.batch_size // (shard.count * recipe.accumulate)),
        samples=len(data.train),
        known=known,
        say=tracker.say,
    )
    told = (starting_notes(recipe, data, model) if state is None else {}) | notes(model, recipe) | emulated(cards)
    strategy, optimizer, updater = wire(context, model)
    tracker.remember({**known, **strategy.known})
    run = Run(
        recipe=recipe,
        interrupts=interrupts,
        callbacks=callbacks,
        datasets=data,
        task=task,
        world=world,
        tracker=tracker,
        strategy=strategy,
        loader=Loader(data, recipe, task, shard, world.device, local_readers(world, shard), known.get(WORKERS)),
        optimizer=optimizer,
        updater=updater,
        average=None,
        timer=StepTimer(world.drives, recipe.logging.warmup_steps),
        total_steps=total_steps(recipe, steps),
        steps_per_epoch=steps,
        num_classes=recipe.model.num_classes or len(data.classes),
        model_size=size,
        batch_norm=batch_norm,
        notes=told,
        speed_only=speed_only,
        begun=begun,
        samples=samples,
        resized=resized,
        flops_per_sample=flops,
        peak_flops=peak,
    )
    run.average = MovingAverage(run.weights(), recipe.ema) if recipe.ema is not None else None
    seed_ranks(recipe.seed, world.rank)
    if data.split_table is not None:  # from here on the run counts: what fails before leaves no folder
        tracker.keep(SPLIT_FILE, data.split_table)
    if tracker.path is not None and not speed_only:
        with presenting.dispensable(tracker):
            contact_sheet.write(tracker.path, data, recipe)
    tracker.say(banner.banner(run))
    if state is not None:
        resuming.restore(run, state)
    tracker.start(run.position, run.total_steps, task.headline())
    presenting.begin(run)
    return run


def claimed(recipe: Recipe, world: World) -> NullTracker:
    """The run folder, which rank 0 has; where it cannot have it, every rank raises the same. Collective."""
    tracker, refused = NullTracker(), None
    if world.is_main:
        try:
            tracker = Tracker(recipe, RunFolder(recipe))
        except TrainerError as error:
            refused = error
    refused, path = world.share((refused, tracker.path))
    if refused is not None:
        raise refused
    stacks.keep_in(path)
    return tracker


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


def start_process(recipe: Recipe) -> None:
    """What a process does before anything that computes."""
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic, recipe.compile)
    set_precision(recipe.precision)


def task_of(recipe: Recipe, data: Datasets) -> Task:
    """The recipe's task for a data set."""
    return tasks.create(recipe, data.classes, labels_at_hand(data.train, skip=False))


def begun_model(recipe: Recipe, task: Task, data: Datasets, state: State | None, world: World) -> nn.Module:
    """The model as training begins with it, or goes on with it from a checkpoint's state. Collective."""
    model = model_of(recipe, task, data, starting=state is None)
    if state is not None:
        initialise(model, state.tensors["model"], "the checkpoint", whole=True)
    elif isinstance(registered_model(recipe.model.name), Given):
        make_alike(model, world)
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


def make_alike(model: nn.Module, world: World) -> None:
    """Rank 0's weights on every rank: a program that torchrun runs may have drawn its own on each."""
    for tensor in [*model.parameters(), *model.buffers()] if world.size > 1 else []:
        tensor.detach().copy_(world.broadcast_(tensor.detach().contiguous()))


def check_task(task: Task, model: nn.Module, data: Datasets) -> None:
    """Try a task of the user's own on two samples of zeros, before an epoch is spent on what its metrics lack.

    Raises:
        RecipeError: it fails, or does not tell what it says that it tells.
    """
    if type(task) in tasks.SHIPPED:
        return
    name, two = task.recipe.task.name, data.example(2).zeros(torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            sums = task.sums(model(two.inputs).float(), two.targets)
            found = task.metrics({key: part.double() for key, part in sums.items()}, 2).keys()
    except ArithmeticError:  # figures of nothing
        return
    except Exception as error:  # a user's task may raise anything at all
        raise RecipeError(
            f"task.name={name} fails on two samples of zeros ({type(error).__name__}: {reason(error)})"
        ) from error
    finally:
        model.train()
    absent = set(task.metric_names()) - found
    if absent:
        raise RecipeError(f"task.name={name}: its metrics are {', '.join(found)}, without {', '.join(sorted(absent))}")


class Wired(NamedTuple):
    """A mode that holds its model, and what updates it."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    updater: Updater


def wire(context: Context, model: nn.Module) -> Wired:
    """Give a model to the context's mode, and an optimizer to what this rank has of it."""
    recipe, device = context.recipe, context.world.device
    if context.world.size > 1:
        check_alone(model)
    scaler = loss_scaler(recipe, device)
    strategy = modes.create(replace(context, scale=scaler.scale if scaler is not None else None))
    roles = roles_of(model, recipe)  # of the whole model, of which a rank may keep a part
    strategy.setup(model)
    optimizer = build_optimizer(strategy.named_parameters(), recipe.optimizer, roles)
    return Wired(strategy, optimizer, Updater(optimizer, recipe, device, scaler))


def local_readers(world: World, shard: Shard) -> int:
    """Ranks of this machine that read images: of a pipeline's, one a replica."""
    return max(1, world.place.local_size * shard.count // world.size)


class Card(NamedTuple):
    """What a card makes of the recipe's precision."""

    peak: float | None  # FLOP/s
    emulates: bool


def cards_of(world: World, precision: str) -> dict[str, Card]:
    """Each card of the run by its name, on every rank; workers that share one count once. Empty on the CPU."""
    if world.device.type != "cuda":
        return {}
    mine = {
        name.partition("#")[0]: Card(peak_flops(device, precision), precision == "bf16" and not has_bf16(device))
        for name, device in world.driven().items()
    }
    found: dict[str, Card] = world.share({name: card for part in world.gather(mine) for name, card in part.items()})
    return found


def emulated(cards: Mapping[str, Card]) -> dict[str, str]:
    """The banner's line of cards without bf16."""
    names = [name for name, card in cards.items() if card.emulates]
    advice = "emulated, which is slow: these cards have no bf16; use precision=fp16 or fp32"
    return {"bf16": f"{', '.join(names[:8])}: {advice}"} if names else {}


def utilisation_base(model: nn.Module, data: Datasets, cards: Mapping[str, Card]) -> tuple[float | None, int]:
    """The cards' peak FLOP/s together and one image's forward FLOPs, where both can be known."""
    peaks = [card.peak for card in cards.values() if card.peak is not None]
    if not peaks or len(peaks) < len(cards):
        return None, 0
    try:
        return sum(peaks), forward_flops(model, data.example(1).shape)
    except (NotImplementedError, RuntimeError):  # an operator, or a look at values, that shapes alone do not have
        return None, 0

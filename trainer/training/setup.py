"""Putting a run together in four steps: `claim` meets the ranks and holds the folder, `resolve` opens the data and
chooses what the recipe leaves open, `build` makes model, mode, optimizer and loader, `begin` writes that the run is.

Evaluating and measuring share `start_process`, `task_of` and `wire`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainer import modes, tasks
from trainer.data import Datasets, Loader, damaged, open_datasets, steps_per_epoch
from trainer.data.cache import cached
from trainer.data.damaged import without_damage
from trainer.data.feeds import known_labels
from trainer.data.folders.layout import HOLDOUT_FILE, NOTHING_BEFORE, Before, continued
from trainer.devices.precision import has_bf16, set_precision
from trainer.errors import RecipeError, TrainerError
from trainer.launch import endings
from trainer.models.inputs import with_pretrained_input
from trainer.models.norms import check_alone
from trainer.models.shapes import without_values
from trainer.modes import Context, Strategy
from trainer.optim.optimization import Updater, loss_scaler
from trainer.optim.optimizers import build_optimizer
from trainer.optim.trainable import normalises_batches, notes, roles_of
from trainer.processes import stacks
from trainer.processes.interrupts import Interrupts
from trainer.processes.resources import keep_freed_memory, locate
from trainer.processes.world import DATA_PATIENCE, World
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import in_pixels
from trainer.recipe.shares import bounded, rows_of, units
from trainer.saving.checkpoint import State
from trainer.saving.journal import OTHER, START
from trainer.saving.run_folder import RunFolder
from trainer.tasks import Task
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.flops import peak_flops, training_flops
from trainer.telemetry.tracking import NullTracker, Tracker
from trainer.training import banner, memory_needs, reporting, resuming, stopping
from trainer.training.callbacks import Callbacks
from trainer.training.initial_model import initial_model, starting_notes
from trainer.training.randomness import random_states, restore_random_states, seed_everything, seed_ranks
from trainer.training.run import ModelFacts, Observer, Run
from trainer.training.same_images import check_same_images, identified
from trainer.training.state import Resolved, TrainState
from trainer.training.teaching import Teacher

SPEED_STEPS = 20  # where there is no data


def prepare(recipe: Recipe, interrupts: Interrupts, closing: ExitStack, callbacks: Callbacks) -> Run:
    """Everything before the first step: claim the run folder, resolve the recipe, build, begin."""
    ledger = Ledger(f"{START}ranks")
    start_process(recipe)
    claimed = claim(recipe, interrupts, callbacks, closing, ledger)
    with claimed.part("data"):
        resolved = resolve(recipe, claimed, closing)
    with claimed.part("model"):
        drawn = random_states([])

        def made(chosen: Resolved) -> Run:
            restore_random_states(drawn, [])
            return build(chosen, interrupts, callbacks, ledger)

        run = memory_needs.fewest(made, resolved)
    with claimed.part("logging"):
        begin(run)
    ledger.turn(OTHER)
    return run


@dataclass(frozen=True)
class Claim:
    """A run folder, held by rank 0 for all ranks, which have met."""

    world: World
    tracker: NullTracker
    resolved_keys: dict[str, Any]  # what the run to be continued chose of its recipe's open keys
    before: Before  # the images that it holds out
    shorter: Recipe | None  # its recipe, where this run is to train longer
    ledger: Ledger

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the start-up, which the journal has from its beginning and end on."""
        with self.ledger.span(f"{START}{name}"):
            yield
        self.tracker.journal.mark(now=True)


def claim(recipe: Recipe, interrupts: Interrupts, callbacks: Callbacks, closing: ExitStack, ledger: Ledger) -> Claim:
    """Meet the other ranks and hold the run folder until `closing` is closed. Collective.

    The folder is held when all have met: a run that waits for its ranks keeps no other out. Where rank 0 cannot have
    it, every rank raises the same.
    """
    world = locate(recipe)
    world.connect(recipe.timeout)
    tracker, before, refused = NullTracker(), NOTHING_BEFORE, None
    if world.is_main:
        try:
            folder = RunFolder(recipe)
            closing.callback(folder.close)
            tracker = Tracker(recipe, folder, ledger, interrupts.own_process)
            closing.callback(tracker.close)
            closing.push(lambda kind, error, trace: note_end(tracker, ledger, interrupts, error))
            interrupts.last_words = tracker.journal.end
            before = continued(folder)
        except TrainerError as error:
            refused = error
    folder_facts = tracker.path, tracker.folder.resolved_keys, tracker.folder.shorter
    refused, before, (path, keys, shorter) = world.broadcast_object((refused, before, folder_facts))
    if refused is not None:
        raise refused
    stacks.write_to(path)
    callbacks.connect(world)
    return Claim(world, tracker, keys, before, shorter, ledger)


def note_end(tracker: NullTracker, ledger: Ledger, interrupts: Interrupts, error: BaseException | None) -> None:
    """The journal gets why this attempt ends, where that is an error."""
    if error is not None:
        ledger.note_failure()
        tracker.journal.end(endings.cause(error, interrupts.received))


def resolve(typed: Recipe, claim: Claim, closing: ExitStack) -> Resolved:
    """Look once at the folder, the data and the machine, and settle what the recipe leaves open. Collective."""
    world, tracker = claim.world, claim.tracker
    recipe = with_pretrained_input(typed.replace(**claim.resolved_keys))
    data = world.all_or_none(lambda: open_datasets(recipe, claim.before), DATA_PATIENCE)
    if "images" in data.notes:
        recipe = recipe.replace(data__image_size=data.image_size, data__channels=data.channels)
    if "measured" in data.notes:
        recipe = recipe.replace(data__mean=[*data.mean], data__std=[*data.std])
    task = task_of(recipe, data)
    share = modes.data_share(recipe, world)
    steps = steps_per_epoch(len(data.train), recipe, share)
    check_same_images(world, data)
    with claim.ledger.span(f"{START}resuming"):
        state = resuming.newest(tracker, world, recipe)
    if state is not None and claim.shorter is not None:
        recipe = resuming.lengthened(recipe, claim.shorter, state, steps)
    if recipe.shares == "auto":
        share = replace(share, numbers=kept_shares(recipe, state, world))
    if state is None:  # a run that goes on has looked
        data = without_damage(data, recipe, world)
    samples = identified(world, data, state)
    data, recipe = cached(replace(data, sources=()), recipe, world, tracker.say, closing)
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        recipe = speed_recipe(recipe, data, tracker.say)
    teacher = None
    if recipe.distill.teacher is not None:
        teacher = world.all_or_none(lambda: Teacher(task, data, world.device, share.targets), DATA_PATIENCE)
        other = teacher.facts != world.broadcast_object(teacher.facts)
        what = f"distill.teacher={recipe.distill.teacher} has other weights on rank {world.rank} than on rank 0"
        world.raise_any(RecipeError(f"{what}: copy the file") if other else None)
    tracker.resolved(recipe)
    facts = speed_only, claim.shorter is not None, teacher
    return Resolved(recipe, data, task, world, share, steps, tracker, state, samples, *facts)


def kept_shares(recipe: Recipe, state: State | None, world: World) -> tuple[float, ...]:
    """What an earlier part of the run measured on devices of the same names; empty where there is nothing."""
    kept = state.facts.get("shares", {}) if state is not None else {}
    if not kept.get("numbers") or not kept.get("measured") or kept["devices"] != [*world.devices]:
        return ()
    every = units(recipe)
    return tuple(bounded(every, kept["numbers"], 1, [every] * world.size))


def speed_recipe(recipe: Recipe, data: Datasets, say: Callable[[str], None]) -> Recipe:
    """Where the data is missing: the recipe's model, global batch and image size on synthetic images, for 20 steps."""
    steps = min(SPEED_STEPS, recipe.max_steps or SPEED_STEPS)
    say(
        f"NO DATA: data.root is not set, so this measures SPEED on SYNTHETIC images and trains nothing of use.\n"
        f"  {recipe.model.name}, global batch {recipe.batch_size}, {in_pixels(data.image_size)} px; {steps} steps "
        "(max_steps=N: fewer); no augmentation, no checkpoint. To train: data.root=/path/to/images"
    )
    plain = {"crop": "none", "auto": "none", "hflip": 0.0, "alternate": False, "erase": 0.0}  # nor is one decoded
    recipe = recipe.replace(**{f"augment__{key}": value for key, value in plain.items()})
    return recipe.replace(max_steps=steps, resume=None)


def start_process(recipe: Recipe) -> None:
    """What a process does before anything that computes."""
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic, recipe.compile)
    set_precision(recipe.precision)


def task_of(recipe: Recipe, data: Datasets) -> Task:
    """The recipe's task for a data set."""
    return tasks.create(recipe, data.classes, known_labels(data.train, skip=False))


def build(resolved: Resolved, interrupts: Interrupts, callbacks: Callbacks, ledger: Ledger) -> Run:
    """Model, mode, optimizer and batches; nothing of the run folder is written yet."""
    recipe, data, world, task = resolved.recipe, resolved.datasets, resolved.world, resolved.task
    say = resolved.tracker.say
    model = initial_model(recipe, task, data, resolved.checkpoint, world, say)
    resolved = memory_needs.settled(resolved, model)
    recipe, recomputed = resolved.recipe, resolved.recomputed
    tuned = world.broadcast_object(resolved.tracker.folder.tuned(say))
    facts = model_facts(model, resolved)
    share = resolved.share
    example = data.example(rows_of(recipe, share.count, numbers=share.numbers)[share.index])
    if (teacher := resolved.teacher) is not None:
        task, example = teacher, replace(example, targets=teacher.targets)
    context = Context(recipe, world, task, example, len(data.train), share, tuned=tuned, say=say, recomputed=recomputed)
    strategy, updater = wire(context, model)
    if teacher is not None:
        teacher.place(strategy)
    # Ranks of this machine that read images: of a pipeline's, one or two a replica.
    reading = int(world.sum_(torch.tensor(float(share.inputs))).item())
    readers = max(1, world.place.local_size * reading // world.size)
    loader = Loader(data, recipe, resolved.task, share, world.device, readers)
    state = TrainState(resolved, strategy, updater, ledger.begun)
    observer = Observer(recipe, world, resolved.tracker, ledger, facts)
    return Run(resolved, state, observer, loader, interrupts, callbacks)


def model_facts(model: nn.Module, resolved: Resolved) -> ModelFacts:
    """What the banner and the figures need of the whole model. Collective."""
    recipe, data = resolved.recipe, resolved.datasets
    cards = cards_of(resolved.world, recipe.precision)
    lines = starting_notes(recipe, data, model) if resolved.checkpoint is None else {}
    lines |= notes(model, recipe)
    if slow := [name for name, (_, emulates) in cards.items() if emulates]:
        lines["bf16"] = f"emulated, slowly, by {', '.join(slow[:8])}: use precision=fp16 or fp32"
    peak, flops = utilisation_base(model, data, cards)
    size = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(size, normalises_batches(model), lines, flops, peak)


def begin(run: Run) -> None:
    """From here on the run counts: its folder gets what it is, and training goes on where its checkpoint ends."""
    recipe, data, tracker = run.recipe, run.datasets, run.tracker
    tracker.folder.keep_tuned(run.strategy.tuned)
    seed_ranks(recipe.seed, run.world.rank)
    if data.holdout_table is not None:
        tracker.keep(HOLDOUT_FILE, data.holdout_table)
    if data.damaged:
        tracker.keep(damaged.SKIPPED_FILE, lambda: damaged.table(data.damaged))
    run.observer.banner_lines = banner.banner_lines(run)
    banner.say(run)
    resolved, state = run.resolved, run.state
    if resolved.checkpoint is not None:
        with run.ledger.span(f"{START}resuming"):
            resuming.restore(resolved, state, resolved.checkpoint)
        stopping.check_patience(resolved, state)
    run.saver.committed = state.position.step
    run.interrupts.nothing_new = lambda: run.saver.committed == state.position.step  # a checkpoint holds all
    if resolved.longer:  # no longer completed, whatever may end it
        tracker.result(reporting.result(run, "running"))
    tracker.start(state.position, state.total_steps, run.task.headline())
    tracker.keep("result.json", lambda: json.dumps(reporting.result(run, "running"), indent=2) + "\n")


def wire(context: Context, model: nn.Module) -> tuple[Strategy, Updater]:
    """Give a model to the context's mode, and an optimizer to what this rank has of it."""
    recipe, device = context.recipe, context.world.device
    if context.world.size > 1:
        check_alone(model, recipe.traits.exchanges)
    scaler = loss_scaler(recipe, device)
    strategy = modes.create(replace(context, scale=scaler.scale if scaler is not None else None))
    roles = roles_of(model, recipe)  # of the whole model, of which a rank may keep a part
    strategy.setup(model)
    optimizer = build_optimizer(strategy.named_parameters(), recipe.optimizer, roles)
    return strategy, Updater(optimizer, recipe, strategy.home, scaler)


def cards_of(world: World, precision: str) -> dict[str, tuple[float | None, bool]]:
    """Each card's peak FLOP/s and whether it emulates this precision, by name, on every rank; workers that share one
    count once. Empty on the CPU."""
    if world.device.type != "cuda":
        return {}
    mine = {
        name.partition("#")[0]: (peak_flops(device, precision), precision == "bf16" and not has_bf16(device))
        for name, device in world.driven().items()
    }
    together = {name: card for part in world.gather(mine) for name, card in part.items()}
    return dict(world.broadcast_object(together))


def utilisation_base(
    model: nn.Module, data: Datasets, cards: Mapping[str, tuple[float | None, bool]]
) -> tuple[float | None, int]:
    """The cards' peak FLOP/s together and one image's FLOPs in training, where both can be known."""
    peaks = [peak for peak, _ in cards.values() if peak is not None]
    if not peaks or len(peaks) < len(cards):
        return None, 0
    try:
        return sum(peaks), training_flops(without_values(model), data.example(1).shape)
    except (NotImplementedError, RuntimeError):  # an operator, or a look at values, that shapes alone do not have
        return None, 0

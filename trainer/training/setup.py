"""Set up a run in four steps.

1. `claim` connects the ranks and locks the run folder.
2. `open_run` opens the data, and chooses values for those undecided keys of the recipe (such as
   keys with the value `auto`) that depend on the data.
3. `resolve_and_build` chooses values for the undecided keys that depend on the device's memory,
   then calls `build`, which creates model, mode, optimizer and loader.
4. `begin` writes the first files of the run and restores its checkpoint.

The commands that evaluate and measure share `start_process`, `create_task` and `place_model`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trainer import modes, tasks
from trainer.data import Datasets, Loader, count_steps_per_epoch, damaged, open_datasets
from trainer.data.cache import cached
from trainer.data.feeds import find_labels
from trainer.data.folders.layout import HOLDOUT_FILE, NOTHING_BEFORE, Before, continued
from trainer.devices.precision import is_emulated, set_precision
from trainer.distributed.world import World
from trainer.distributed.world_setup import create_world
from trainer.errors import RecipeError, TrainerError
from trainer.launch import endings
from trainer.models.blocks import count_parameters
from trainer.models.inputs import add_pretrained_input
from trainer.models.norms import check_alone, list_training_norms
from trainer.models.shapes import copy_to_meta
from trainer.models.undisturbed import restore_after
from trainer.modes import Context, Strategy
from trainer.optim.optimization import Updater, build_loss_scaler
from trainer.optim.optimizers import build_optimizer
from trainer.optim.trainable import describe_training, find_roles
from trainer.processes import stacks
from trainer.processes.interrupts import Interrupts
from trainer.processes.resources import keep_freed_memory
from trainer.recipe import Recipe
from trainer.recipe.image_sizes import in_pixels
from trainer.recipe.shares import count_units, divide_within_limits
from trainer.recipe.text import list_some
from trainer.saving.checkpoint import State
from trainer.saving.journal import OTHER, START
from trainer.saving.run_folder import RunFolder, is_check_folder
from trainer.tasks import Task
from trainer.telemetry.clocks import Ledger
from trainer.telemetry.flops import count_training_flops, look_up_peak_flops
from trainer.telemetry.tracking import NullTracker, Tracker
from trainer.training import banner, memory_keys, noticing, reporting, resuming, stopping
from trainer.training.callbacks import Callbacks
from trainer.training.initial_model import build_initial_model, describe_start
from trainer.training.observer import ModelFacts, Observer
from trainer.training.parts import hash_user_code
from trainer.training.probing import build_probe
from trainer.training.randomness import (
    read_random_states,
    restore_random_states,
    seed_everything,
    seed_ranks,
)
from trainer.training.results import Result
from trainer.training.run import Run
from trainer.training.same_images import check_same_images, identify_images
from trainer.training.state import Opened, Resolved, TrainState
from trainer.training.teaching import Teacher

# Maximum number of steps of a run that measures speed on synthetic images because its data is
# missing.
SPEED_STEPS = 20


def prepare(
    recipe: Recipe, interrupts: Interrupts, closing: ExitStack, callbacks: Callbacks
) -> Run:
    """Create all objects of a run, and restore its checkpoint."""
    ledger = Ledger(f"{START}ranks")
    start_process(recipe)
    claimed = claim(recipe, interrupts, callbacks, closing, ledger)
    with claimed.part("data"):
        opened = open_run(recipe, claimed, closing)
    with claimed.part("model"):
        states = read_random_states()

        def build_from_states(resolved: Resolved) -> Run:
            # A probe's model must not change the random numbers of the model that trains.
            restore_random_states(states)
            return build(resolved, interrupts, callbacks, ledger)

        run = memory_keys.resolve_and_build(opened, build_from_states)
    with claimed.part("logging"):
        begin(run)
    ledger.start_part(OTHER)
    return run


@dataclass(frozen=True)
class Claim:
    """Connected ranks, and the run folder that rank 0 has locked for them.

    Attributes:
        world: The connected ranks.
        tracker: The writer of the run folder on rank 0; a tracker without effects on other ranks.
        resolved_keys: Values that the resumed run has chosen for undecided keys of its recipe.
        before: The validation split of the run that is resumed; NOTHING_BEFORE in a new run.
        shorter: The recipe of the resumed run if this run trains longer, or else None.
        ledger: Seconds of this attempt by activity.
    """

    world: World
    tracker: NullTracker
    resolved_keys: dict[str, Any]
    before: Before
    shorter: Recipe | None
    ledger: Ledger

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the time of one part of the start-up, and write it to the journal."""
        with self.ledger.span(f"{START}{name}"):
            yield
        self.tracker.journal.mark(now=True)


def claim(
    recipe: Recipe, interrupts: Interrupts, callbacks: Callbacks, closing: ExitStack, ledger: Ledger
) -> Claim:
    """Connect to the other ranks and lock the run folder until `closing` is closed. Collective.

    The folder is locked only after all ranks are connected, so that a run that waits for its ranks
    does not block other runs.

    Raises:
        TrainerError: Rank 0 cannot lock the folder. Every rank raises the same error.
    """
    world = create_world(recipe)
    world.connect(recipe.timeout)
    tracker = NullTracker()
    before = NOTHING_BEFORE
    refusal = None
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
            refusal = error
    folder_facts = tracker.path, tracker.folder.resolved_keys, tracker.folder.shorter
    main_values = world.broadcast_object((refusal, before, folder_facts))
    refusal, before, (path, resolved_keys, shorter) = main_values
    if refusal:
        raise refusal
    if not is_check_folder(path):
        stacks.write_to(path)
    callbacks.connect(world)
    return Claim(world, tracker, resolved_keys, before, shorter, ledger)


def note_end(
    tracker: NullTracker, ledger: Ledger, interrupts: Interrupts, error: BaseException | None
) -> None:
    """Write the cause to the journal if this attempt ends with an error."""
    if error is not None:
        ledger.note_failure()
        tracker.journal.end(endings.cause(error, interrupts.received))


def open_run(typed: Recipe, claim: Claim, closing: ExitStack) -> Opened:
    """Open the data and the checkpoint, and choose values for the keys that depend on them.

    Collective.
    """
    world = claim.world
    tracker = claim.tracker
    recipe = add_pretrained_input(typed.replace(**claim.resolved_keys))
    data = world.all_or_none(lambda: open_datasets(recipe, claim.before))
    if "images" in data.notes:
        recipe = recipe.replace(data__image_size=data.image_size, data__channels=data.channels)
    if "measured" in data.notes:
        recipe = recipe.replace(data__mean=[*data.mean], data__std=[*data.std])
    task = create_task(recipe, data)
    share = modes.find_strategy_class(recipe, world).data_share(recipe, world)
    steps = count_steps_per_epoch(len(data.train), recipe, share)
    check_same_images(world, data)
    with claim.ledger.span(f"{START}resuming"):
        state = resuming.find_newest(tracker, world, recipe)
    if state and claim.shorter:
        recipe = resuming.extend_recipe(recipe, claim.shorter, state, steps)
    if recipe.shares == "auto":
        share = replace(share, numbers=read_kept_shares(recipe, state, world))
    # Only a run without a checkpoint is checked for damaged images. A run with a checkpoint was
    # checked when it was first started.
    if state is None:
        data = damaged.find_damaged(data, recipe, world)
    samples = identify_images(world, data, state)
    data = replace(data, sources=())
    data, recipe = cached(data, recipe, world, tracker.say, closing)
    speed_only = data.synthetic and recipe.data.name != "synthetic"
    if speed_only:
        recipe = build_speed_recipe(recipe, data, tracker.say)
    teacher = None
    if recipe.distill.teacher is not None:
        teacher = world.all_or_none(lambda: Teacher(task, data, world.device, share.targets))
        error = None
        if teacher.facts != world.broadcast_object(teacher.facts):
            error = RecipeError(
                f"distill.teacher={recipe.distill.teacher} has other weights on rank {world.rank} "
                "than on rank 0: copy the file"
            )
        world.raise_any(error)
    tracker.recipe = recipe
    return Opened(
        recipe,
        data,
        task,
        world,
        share,
        steps,
        tracker,
        state,
        samples,
        speed_only=speed_only,
        longer=claim.shorter is not None,
        teacher=teacher,
    )


def read_kept_shares(recipe: Recipe, state: State | None, world: World) -> tuple[float, ...]:
    """Return the shares that the run measured before it was resumed.

    Returns:
        The share of each rank in units of `count_units`. The tuple is empty if the shares were not
        measured, or were measured on different devices.
    """
    saved = {}
    if state:
        saved = state.facts.get("shares", {})
    if (
        not saved.get("numbers")
        or not saved.get("measured")
        or saved["devices"] != [*world.devices]
    ):
        return ()
    total = count_units(recipe)
    return tuple(divide_within_limits(total, saved["numbers"], 1, [total] * world.size))


def build_speed_recipe(recipe: Recipe, data: Datasets, say: Callable[[str], None]) -> Recipe:
    """Return the recipe of a speed measurement, for a run whose data is missing.

    The measurement trains at most SPEED_STEPS steps on synthetic images, with the model, global
    batch size and image size of `recipe`.
    """
    steps = min(SPEED_STEPS, recipe.max_steps or SPEED_STEPS)
    say(
        "NO DATA: data.root is not set, so this measures SPEED on SYNTHETIC images and trains "
        f"nothing of use.\n  {recipe.model.name}, global batch {recipe.batch_size}, "
        f"{in_pixels(data.image_size)} px; {steps} steps (max_steps=N: fewer); no augmentation, no "
        "checkpoint. To train: data.root=/path/to/images"
    )
    # Synthetic images are not decoded, so augmentation would not cost what it costs with photos. It
    # is switched off, except mixup and cutmix, so that the measurement does not include it.
    mixing = {"mixup": recipe.augment.mixup, "cutmix": recipe.augment.cutmix}
    return recipe.replace(max_steps=steps, resume=None, augment=mixing)


def start_process(recipe: Recipe) -> None:
    """Set allocator, seeds and precision of the process, before the first computation."""
    keep_freed_memory()
    seed_everything(recipe.seed, recipe.deterministic, recipe.compile)
    set_precision(recipe.precision)


def create_task(recipe: Recipe, data: Datasets) -> Task:
    """Return the recipe's task for a data set."""
    targets = find_labels(data.train, skip=False)
    return tasks.create_task(recipe, data.classes, targets, len(data.val))


def build(resolved: Resolved, interrupts: Interrupts, callbacks: Callbacks, ledger: Ledger) -> Run:
    """Create model, mode, optimizer and loader. The run folder does not change."""
    recipe = resolved.recipe
    data = resolved.datasets
    world = resolved.world
    task = resolved.task
    say = resolved.tracker.say
    model = build_initial_model(recipe, task, data, resolved.checkpoint, world, say)
    notes = {}
    knn_top1 = None
    if recipe.model.probe:
        model, data, notes["features"], knn_top1 = build_probe(model, resolved)
    facts = collect_model_facts(model, resolved, data)
    facts = replace(facts, notes=facts.notes | notes, knn_top1=knn_top1)
    share = resolved.share
    rank_rows = share.count_rows(recipe)
    example = data.example(rank_rows[share.index])
    teacher = resolved.teacher
    if teacher:
        task = teacher
        example = replace(example, targets=teacher.targets)
    context = Context(
        recipe,
        world,
        task,
        example,
        len(data.train),
        share,
        tuned=resolved.tuned,
        say=say,
        recomputed=resolved.recomputed,
    )
    strategy, updater = place_model(context, model)
    if teacher:
        teacher.place(strategy)
    # The ranks of a machine that read images share its cores for their loader workers. In a
    # pipeline, only one or two ranks of each replica read images.
    reads = torch.tensor(float(share.inputs))
    reading_ranks = int(world.sum_(reads))
    readers = max(1, world.place.local_size * reading_ranks // world.size)
    loader = Loader(data, recipe, resolved.task, share, world.device, readers)
    state = TrainState(resolved, strategy, updater, ledger.start_time)
    observer = Observer(recipe, world, resolved.tracker, ledger, facts)
    return Run(resolved, state, observer, loader, interrupts, callbacks)


def collect_model_facts(model: nn.Module, resolved: Resolved, data: Datasets) -> ModelFacts:
    """Return the properties of the whole model for the banner and speed reports. Collective."""
    recipe = resolved.recipe
    cards = describe_devices(resolved.world, recipe.precision)
    lines = {}
    if resolved.checkpoint is None:
        lines = describe_start(recipe, data, model)
    lines |= describe_training(model, recipe)
    emulating = [name for name, (_, emulates) in cards.items() if emulates]
    if emulating:
        line = "emulated, slowly, by CPUs without AVX-512: use precision=fp32"
        if resolved.world.device.type == "cuda":
            line = f"emulated, slowly, by {list_some(emulating, 8)}: use precision=fp16 or fp32"
        lines[recipe.precision] = line
    peak, flops = compute_utilisation_base(model, data, cards)
    size = count_parameters(model)
    return ModelFacts(size, bool(list_training_norms(model)), lines, flops, peak)


def begin(run: Run) -> None:
    """Write the first files of the run and restore its checkpoint, if any."""
    recipe = run.recipe
    data = run.datasets
    tracker = run.tracker
    # The first call reads the user's source files, and later calls return the same digests. Call it
    # now, so that the digests do not include later edits.
    hash_user_code()
    tracker.folder.write_tuned(run.strategy.tuned)
    seed_ranks(recipe.seed, run.world.rank)
    if data.holdout_table is not None:
        tracker.keep(HOLDOUT_FILE, data.holdout_table)
    if data.damaged:
        tracker.keep(damaged.SKIPPED_FILE, lambda: damaged.format_damaged(data.damaged))
    resolved = run.resolved
    state = run.state
    lines = banner.build_banner(
        resolved, run.strategy, run.observer.model, run.loader.workers_in_words()
    )
    run.observer.banner_lines = lines
    banner.print_banner(recipe, run.world.devices, lines, tracker)
    if resolved.checkpoint:
        with run.ledger.span(f"{START}resuming"):
            resuming.restore(resolved, state, resolved.checkpoint)
            noticing.compare_epochs(resolved, run.strategy)
        stopping.check_patience(resolved, state)
    run.saver.committed = state.position.step
    # A signal may end the process without a save while the last checkpoint holds everything.
    run.interrupts.nothing_new = lambda: run.saver.committed == state.position.step
    # The result in the folder says "completed", which is no longer true once this run has started.
    if resolved.longer:
        tracker.result(current_result(run, "running"))
    tracker.start(
        state.position,
        state.total_steps,
        metric=run.task.headline(),
        evaluated_step=state.history.evaluated_step,
    )
    if recipe.logging.wandb or recipe.logging.mlflow:
        # Only rank 0 contacts the servers, which may take minutes. So the ranks use `wait_for`,
        # which has a longer timeout than the recipe's.
        run.world.wait_for(None)
    tracker.keep("result.json", lambda: json.dumps(current_result(run, "running"), indent=2) + "\n")


def current_result(
    run: Run, status: str, error: str | None = None, exit_code: int | None = None
) -> Result:
    """Return the present content of result.json. See `reporting.build_result`."""
    return reporting.build_result(
        run.resolved,
        run.state,
        run.observer,
        run.loader.samples_per_step,
        run.steps.kind,
        run.saver.costs,
        status,
        error,
        exit_code,
    )


def place_model(context: Context, model: nn.Module) -> tuple[Strategy, Updater]:
    """Create the mode that trains `model`, and the updater of this rank's parameters. Collective.

    The mode moves the model to the devices of the ranks, and may divide it.
    """
    recipe = context.recipe
    if context.world.size > 1:
        check_alone(model, recipe.traits.exchanges)
    scaler = build_loss_scaler(recipe, context.world.device)
    if scaler:
        context = replace(context, scale=scaler.scale)
    strategy = modes.create(context)
    # Roles depend on the whole model, and after `setup` a rank may have only a part of the model.
    roles = find_roles(model, recipe)
    strategy.setup(model)
    parameters = strategy.named_parameters()
    optimizer = build_optimizer(parameters, recipe.optimizer, roles)
    updater = Updater(optimizer, recipe, strategy.gradient_device, scaler, roles)
    updater.frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    return strategy, updater


def describe_devices(world: World, precision: str) -> dict[str, tuple[float | None, bool]]:
    """Describe the devices of all ranks. Collective.

    Returns:
        `{name: (peak, emulates)}`: For each device its peak FLOP/s, None if unknown, and whether it
        emulates `precision`. A GPU that several ranks share appears once.
    """
    local_cards = {}
    for name, device in world.driven().items():
        peak = look_up_peak_flops(device, precision)
        local_cards[name.partition("#")[0]] = peak, is_emulated(precision, device)
    cards: dict[str, tuple[float | None, bool]] = {}
    for rank_cards in world.gather(local_cards):
        cards |= rank_cards
    return dict(world.broadcast_object(cards))


def compute_utilisation_base(
    model: nn.Module, data: Datasets, cards: Mapping[str, tuple[float | None, bool]]
) -> tuple[float | None, int]:
    """Return the two numbers from which the utilization of the GPUs is computed.

    Returns:
        `(peak, flops)`: The peak FLOP/s of all GPUs together, and the FLOPs of training on one
        image. `(None, 0)` if either is unknown.
    """
    peaks = [peak for peak, _ in cards.values() if peak is not None]
    if not peaks or len(peaks) < len(cards):
        return None, 0
    try:
        # The copy shares closures and globals with the model. A pass may change the state of these,
        # so it is restored.
        with restore_after([model]):
            return sum(peaks), count_training_flops(copy_to_meta(model), data.example(1).shape)
    # Some models cannot be copied, need values besides shapes, or need more than one image. Their
    # FLOPs are unknown.
    except Exception:
        return None, 0

"""Warnings about problems of a run. Each is printed once.

The functions do not wait for a device, except when a process starts and in its first steps. Only
naming a slow rank needs communication between the ranks.
"""

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from trainer.data import ImageSet, LabelledSource, TensorSet
from trainer.models.equivalence import sketch_tensors
from trainer.models.norms import buffers_besides_statistics
from trainer.models.reachable import Reachable, is_own
from trainer.models.undisturbed import find_change, is_plain, restore_after
from trainer.modes import Strategy
from trainer.saving.tensor_files import view_bytes
from trainer.tasks import Classification, Task
from trainer.telemetry import symptoms
from trainer.training.evaluation import Sums
from trainer.training.observer import Noticed
from trainer.training.state import Resolved, TrainState

# Maximum number of elements of a tensor attribute that is compared. A larger tensor is assumed to
# hold data, not state.
LARGEST_STATE = 10**6
NOT_SAVED = (
    "no checkpoint contains it, so this resumed run started without it; keep it in a buffer "
    "(register_buffer())"
)
# Minimum number of seconds between the building of a run and a warning about the load by other
# processes, because the load may be short. The warning does not wait for the end of an epoch: if
# threads wait for each other, steps can be ten times as slow as on an idle machine.
LONG = 5.0


def note_classes(task: Task, noticed: Noticed, sums: Sums) -> None:
    """Store an evaluation's counts per class in `noticed.classes`.

    The counts of the last two evaluations are kept. Nothing is stored unless the task is a
    `Classification` that does not override `metrics`.
    """
    names = {"actual", "predicted"}
    has_accuracy = isinstance(task, Classification)
    has_accuracy = has_accuracy and type(task).metrics is Classification.metrics
    if has_accuracy and names <= sums.whole.keys():
        counts = {name: sums.whole[name].long().tolist() for name in names}
        noticed.classes = [*noticed.classes, counts][-2:]


def watch_ranks(
    resolved: Resolved, noticed: Noticed, step: int, steps: int, ranks: Sequence[Sequence[float]]
) -> None:
    """Warn about a rank that was slow in several successive windows of `RankWatch`.

    Collective if a rank is named. All ranks name it at the same step, because they have the same
    measurements.

    Args:
        resolved: The configuration of the run.
        noticed: The observations so far, which this function updates.
        step: Number of the last step.
        steps: Number of steps that were measured.
        ranks: For each rank the seconds that `RankWatch.add` accepts.
    """
    world = resolved.world
    slowest = noticed.ranks.add(steps * ranks[0][0], ranks)
    if slowest is None:
        return
    values = {"speed/slowest_rank_pct": 100 * slowest.behind}
    resolved.tracker.scalars(values, step)
    lag = noticed.ranks.named()
    if lag:
        where = f"{socket.gethostname()}, {world.device}"
        sentence = ""
        # Only the slow rank knows its own host and device.
        if world.rank == lag.rank:
            sentence = symptoms.describe_slow_rank(lag, where, resolved.recipe)
        sentence = world.broadcast_object("".join(world.gather(sentence)))
        kind = f"rank {lag.rank}"
        # The problem may have passed by the end of the epoch. The warning is stored in `lasting`
        # too, so that it is reported at the end of the run all the same.
        noticed.announced.add(kind)
        noticed.lasting[kind] = noticed.warnings[kind] = sentence
        resolved.tracker.print_lines({"warning": sentence})
        resolved.tracker.journal.notice(f"step {step}: {sentence}")


def print_new_warnings(resolved: Resolved, state: TrainState, noticed: Noticed) -> None:
    """Print a line for each current problem that was not printed before."""
    update_warnings(resolved, state, noticed, over=False)
    for kind, sentence in noticed.warnings.items():
        # `strain.seconds` is the time since the run was built.
        is_due = kind != "cores" or noticed.strain.seconds > LONG
        if kind not in noticed.announced and is_due:
            noticed.announced.add(kind)
            resolved.tracker.print_lines({"warning": sentence})


def print_early_load(resolved: Resolved, state: TrainState, noticed: Noticed) -> None:
    """Check the load by other processes once, `LONG` seconds after the run was built, and warn."""
    meter = noticed.meter
    if noticed.is_load_checked or time.perf_counter() - meter.start_time < LONG:
        return
    noticed.is_load_checked = True
    facts = replace(_facts(resolved, state, noticed, over=False), strain=meter.read())
    warning = symptoms.check_cores(facts, resolved.recipe)
    if warning is not None:
        noticed.announced.add("cores")
        resolved.tracker.print_lines({"warning": warning})


def update_warnings(resolved: Resolved, state: TrainState, noticed: Noticed, over: bool) -> None:
    """Set `noticed.warnings` to the lasting and the current warnings.

    `over` is True at the run's end.
    """
    facts = _facts(resolved, state, noticed, over)
    noticed.warnings = noticed.lasting | symptoms.find_symptoms(facts, resolved.recipe)


def _facts(
    resolved: Resolved, state: TrainState, noticed: Noticed, over: bool
) -> symptoms.RunState:
    recipe = resolved.recipe
    task = resolved.task
    world = resolved.world
    datasets = resolved.datasets
    history = state.history
    classes = noticed.classes
    is_plain_loss = isinstance(task, Classification) and type(task).loss is Classification.loss
    is_unweighted = is_plain_loss and recipe.loss.class_weights is None
    facts = symptoms.RunState(
        over=over,
        step=state.position.step - state.step_offset,
        steps=state.total_steps - state.step_offset,
        epoch_steps=resolved.steps_per_epoch,
        warmup=round(recipe.schedule.warmup_epochs * resolved.steps_per_epoch),
        strain=noticed.strain,
        threads=world.threads if world.device.type == "cpu" else 1,
    )
    # Losses and metrics on synthetic images say nothing about training, so they are left out.
    if datasets.synthetic:
        return facts
    facts = replace(
        facts,
        losses=[loss for loss in history.losses if math.isfinite(loss)],
        classes=task.outputs() if is_unweighted else None,
        names=datasets.classes,
        validation=history.latest,
        labelled=isinstance(datasets.train, ImageSet | TensorSet | LabelledSource),
    )
    if not classes:
        return facts
    return replace(
        facts,
        actual=classes[-1]["actual"],
        predicted=classes[-1]["predicted"],
        before=classes[0]["predicted"] if len(classes) > 1 else (),
    )


def compare_passes(resolved: Resolved, strategy: Strategy, noticed: Noticed) -> None:
    """Warn if each pass changes weights, or state other than statistics such as BatchNorm's.

    A step of several micro-batches changes such state several times, so it differs from a step of
    the whole batch. A checkpoint contains only the weights and persistent buffers of a model, so a
    resumed run starts without any other state.
    """
    modules = strategy.modules()
    is_resumed = resolved.checkpoint is not None
    reachable = Reachable(modules)
    tensors = {
        name: value
        for name, value in reachable.values
        if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) <= LARGEST_STATE
    }
    saved = set[int]()
    if is_resumed:
        saved = {*map(id, strategy.named_buffers().values())}
    for module in modules:
        for name, buffer in buffers_besides_statistics(module).items():
            if id(buffer) not in saved:
                tensors[f"buffer {name}"] = buffer
    after = reachable.plain
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            after[name] = value.tobytes()
        elif is_plain(value):
            after[name] = bytes(view_bytes(value))
    # In a new run, the compared passes belong to one step, so only the passes themselves can have
    # changed the weights. In a resumed run, an update may lie between the passes, and with hogwild,
    # other ranks write the weights at any time, so there the weights are not compared.
    if not is_resumed and not resolved.recipe.traits.shared_memory:
        sketches = sketch_tensors(strategy.named_parameters())
        after |= {f"weight {name}": sketch for name, sketch in sketches.items()}
    if noticed.state_seen:
        pieces = resolved.recipe.pieces
        consequence = (
            f"a step in {pieces} pieces has {pieces} passes, so it is not the step of accumulate=1"
        )
        if is_resumed:
            consequence = NOT_SAVED
        _warn_of_change(resolved, "pass", noticed.state_seen, after, consequence)
    noticed.state_seen = after
    noticed.passes_to_compare -= 1


def compare_epochs(resolved: Resolved, strategy: Strategy) -> None:
    """Warn if the model's own `train()` changes state that no checkpoint contains.

    A resumed run starts without such state.
    """
    modules = strategy.modules()
    if not any(_overrides_train(part) for module in modules for part in module.modules()):
        return
    states = []
    with restore_after(modules, *resolved.world.local_devices, weights=True):
        for _ in range(2):
            for module in modules:
                module.eval()
                module.train()
            states.append(Reachable(modules).plain)
    _warn_of_change(resolved, "epoch", states[0], states[1], NOT_SAVED)


def _overrides_train(module: nn.Module) -> bool:
    own_classes = filter(is_own, type(module).__mro__)
    return any("train" in vars(owner) for owner in (module, *own_classes))


def _warn_of_change(
    resolved: Resolved,
    period: str,
    before: Mapping[str, object],
    after: Mapping[str, object],
    consequence: str,
) -> None:
    changed = find_change(before, after)
    if changed is not None:
        resolved.tracker.say(
            f"WARNING: each {period} changes the {changed} of "
            f"model.name={resolved.recipe.model.name}, "
            f"and {consequence}"
        )

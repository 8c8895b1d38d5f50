"""Warnings about a run that learns badly or is slowed down, each with overrides to try.

All functions are pure. A wrong warning does more harm than a missing one, so a healthy run must not
reach any of the limits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.devices.host import Strain
from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.recipe_files import parse_value
from trainer.recipe.text import list_some
from trainer.telemetry.rank_watch import Lag

# Minimum number of steps for a warning about accuracy, memorization or a class that is never
# predicted. After fewer steps, a healthy run may not have learned anything yet.
MIN_STEPS = 50
# Minimum number of validation images for a warning about accuracy or memorization, and minimum
# number of validation images of a class for a warning that this class is never predicted.
MIN_VALIDATION_IMAGES = 50
MIN_CLASS_IMAGES = 20
# There is a warning about accuracy only if the model was no better than a constant prediction of
# the largest class in each of this number of latest epochs. One or two such epochs can be a slow
# start.
STANDSTILL_EPOCHS = 3
# Minimum ratio of the loss to the loss of guessing for a warning. The loss of a healthy run starts
# below this ratio, or falls below it within an epoch.
GUESSING_FACTOR = 1.1
# Minimum ratio of the loss to its lowest value so far for a warning. Random variation between
# epochs is far smaller.
GROWTH_FACTOR = 1.5
# Maximum excess of the training loss over the lowest possible loss for which training counts as
# perfect. It corresponds to a probability of 95 % for the right class.
MAX_PERFECT_LOSS = 0.05
# Minimum validation error for the warning that the training set was memorized. A model with a
# lower error counts as one that generalizes, even if its training loss is near zero.
MIN_ERROR = 0.1
# Minimum fraction of the cores' time that other processes use for a warning. A smaller fraction
# slows a run down by less than a quarter.
MIN_OTHERS_SHARE = 0.2
# Minimum number of seconds over which the load of the cores must have been measured.
MIN_SECONDS = 1.0


@dataclass(frozen=True)
class RunState:
    """State of a run at the end of an epoch or of training.

    Attributes:
        over: Whether training has ended.
        step: Number of steps done.
        steps: Number of steps of the whole run.
        epoch_steps: Number of steps of an epoch.
        warmup: Number of steps in which the learning rate rises.
        losses: Mean training loss of each epoch.
        validation: Metrics of the last epochs, up to this one.
        classes: Number of classes of a classification with the built-in loss and no class weights;
            None for any other task.
        names: Names of the classes.
        actual: Number of validation images of each class; empty if unknown.
        predicted: Number of validation images predicted as each class; empty if unknown.
        before: `predicted` of the previous epoch; empty if unknown.
        labelled: Whether the labels of the training images are known, so that classes can be
            balanced.
        strain: Load of the machine by other processes.
        threads: Number of threads that compute together in a process; 1 on a GPU.
    """

    over: bool
    step: int
    steps: int
    epoch_steps: int
    warmup: int = 0
    losses: Sequence[float] = ()
    validation: Sequence[Mapping[str, float]] = ()
    classes: int | None = None
    names: Sequence[str] = ()
    actual: Sequence[int] = ()
    predicted: Sequence[int] = ()
    before: Sequence[int] = ()
    labelled: bool = False
    strain: Strain = field(default_factory=Strain)
    threads: int = 1

    @property
    def guessing(self) -> float | None:
        """Loss of a model that predicts the same probability for all classes; None if unknown.

        This loss does not depend on smoothing or mixing of the targets.
        """
        if self.classes and self.classes > 1:
            return math.log(self.classes)
        return None

    @property
    def warm(self) -> Sequence[float]:
        """Training losses of the epochs after the warm-up."""
        return self.losses[math.ceil(self.warmup / self.epoch_steps) :]


def find_symptoms(state: RunState, recipe: Recipe) -> dict[str, str]:
    """Return the warnings about a run by kind, without those that another warning explains."""
    warnings = {kind: check(state, recipe) for kind, check in KINDS.items()}
    return {
        kind: text
        for kind, text in warnings.items()
        if text is not None and not warnings.get(CAUSES.get(kind, ""))
    }


def _check_loss(state: RunState, recipe: Recipe) -> str | None:
    losses = state.losses
    warm = state.warm
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    last = losses[-1]
    lowest = min(losses)
    if state.guessing is not None:
        limit = GUESSING_FACTOR * state.guessing
        reference = f"guessing ({state.guessing:.2f})"
    else:
        # The scale of any other loss is unknown, so warn only if all learning has been undone.
        limit = max(losses[0], GROWTH_FACTOR * abs(lowest))
        reference = f"at the beginning ({losses[0]:.4g})"
    # In the warm-up, the loss of a healthy run may start high, but it does not rise again later.
    has_grown = last > GROWTH_FACTOR * lowest
    still_rises = len(warm) > 1 and last > min(warm[:-1])
    if last <= limit or not (has_grown or still_rises):
        return None
    remedies = [f"optimizer.lr={recipe.optimizer.lr / 10:.3g}"]
    if recipe.clip_grad_norm is None:
        remedies.append("clip_grad_norm=1")
    text = f"the loss is worse than {reference} and does not fall, {last:.4g} now: "
    return f"{text}lower optimizer.lr{_suggest(recipe, *remedies)}"


def _check_accuracy(state: RunState, recipe: Recipe) -> str | None:
    count = sum(state.actual)
    last = state.validation[-STANDSTILL_EPOCHS:]
    warm_steps = state.step - state.warmup
    is_early = min(len(last), len(state.warm)) < STANDSTILL_EPOCHS or warm_steps < MIN_STEPS
    # If the recipe balances classes, a better model may have a lower accuracy, so do not check it.
    balances = _list_balancing_overrides(recipe)
    if is_early or count < MIN_VALIDATION_IMAGES or not balances:
        return None
    share = max(state.actual) / count
    shares = (n / count for n in state.actual if n)
    entropy = -sum(fraction * math.log(fraction) for fraction in shares)
    deviation = math.sqrt(share * (1 - share) / count)
    is_better = any(epoch["top1"] > share + deviation for epoch in last)
    if is_better or state.losses[-1] < 0.9 * entropy:
        return None
    # The validation loss has neither smoothed nor mixed targets. A model that has learned more than
    # the sizes of the classes has a lower or a falling validation loss.
    falling = 0.98 * last[0]["loss"]
    if not last[-1]["loss"] > max(0.95 * entropy, falling):
        return None
    text = f"accuracy is stuck at {last[-1]['top1']:.0%}, and the largest class has {share:.0%} of "
    text += "the held-out images: nothing is learned"
    present = sum(n > 0 for n in state.actual)
    if state.labelled and share >= 2 / present:
        return text + _suggest(recipe, *balances)
    lower = f"optimizer.lr={recipe.optimizer.lr / 10:.3g}"
    higher = f"optimizer.lr={10 * recipe.optimizer.lr:g}"
    return f"{text}{_suggest(recipe, lower, higher)}, and check that the labels are right"


def _check_memorised(state: RunState, recipe: Recipe) -> str | None:
    # With mixed targets, the lowest possible loss is unknown, so it cannot be compared.
    if recipe.augment.mixup or recipe.augment.cutmix or state.classes is None:
        return None
    if sum(state.actual) < MIN_VALIDATION_IMAGES or state.step < MIN_STEPS or len(state.losses) < 2:
        return None
    if not state.validation:
        return None
    smoothing = recipe.loss.label_smoothing
    smooth = smoothing / state.classes
    targets = [1 - smoothing + smooth, *[smooth] * (state.classes - 1)]
    # The cross-entropy of smoothed targets cannot fall below their own entropy.
    floor = -sum(share * math.log(share) for share in targets if share)
    top1 = state.validation[-1]["top1"]
    if max(state.losses[-2:]) - floor > MAX_PERFECT_LOSS or 1 - top1 < MIN_ERROR:
        return None
    remedies = ["augment.mixup=0.2"]
    if recipe.optimizer.weight_decay == 0:
        remedies.append("optimizer.weight_decay=0.0005")
    text = f"training is perfect (loss {state.losses[-1]:.2g}) and validation is not "
    text += f"(top-1 {top1:.0%}): more images help"
    return text + _suggest(recipe, *remedies, start=", or ")


def _check_never_predicted(state: RunState, recipe: Recipe) -> str | None:
    # Hard classes are learned late, so the first half of a run gets no warning.
    is_late = state.over or 2 * state.step > state.steps
    if not state.before or state.step - state.warmup < MIN_STEPS or not is_late:
        return None
    # Only the evaluations at the end of an epoch are in `validation`, and the run may end before.
    if not state.validation:
        return None
    largest = max(state.actual) / sum(state.actual)
    # If the model has hardly learned anything, its problem is not a particular class.
    if state.validation[-1]["top1"] <= 1.5 * largest:
        return None
    unnamed = range(len(state.names), len(state.actual))
    class_names = [*state.names, *map(str, unnamed)]
    counts = zip(class_names, state.actual, state.predicted, state.before, strict=True)
    names = []
    count = 0
    for name, actual, predicted, before in counts:
        if actual >= MIN_CLASS_IMAGES and not (predicted or before):
            names.append(name)
            count += actual
    if not names:
        return None
    pronoun = "them"
    if len(names) == 1:
        pronoun = "it"
    text = f"no image is predicted as {list_some(names, 5)}, although the held-out images include "
    text += f"{count} of {pronoun}"
    balance = ""
    if state.labelled:
        balance = _suggest(recipe, *_list_balancing_overrides(recipe))
    if not balance:
        balance = ": check that the training images have enough and that their labels are right"
    return text + balance


def check_cores(state: RunState, recipe: Recipe) -> str | None:
    """Return a warning about the load by other processes on this machine; None if it is low."""
    if state.strain.others < MIN_OTHERS_SHARE or state.strain.seconds < MIN_SECONDS:
        return None
    remedy = ""
    # All threads wait for a thread that has no core, so two threads can be far slower than one.
    if state.threads > 1:
        remedy = _suggest(recipe, "threads=1", start="")
    if remedy:
        remedy += ", or "
    share = min(1.0, state.strain.others)
    text = f"other processes used the cores for {share:.0%} of the time, so speeds are unreliable: "
    return f"{text}{remedy}stop them (top shows which) and run it again"


def describe_slow_rank(
    lag: Lag,
    where: str,
    recipe: Recipe,
) -> str:
    """Return a warning about a rank that delays the other ranks.

    Args:
        lag: The rank, and how much slower it is.
        where: Machine and device of the rank, for the user.
        recipe: Recipe of the run.
    """
    text = f"rank {lag.rank} ({where}) was {lag.behind:.0%} slower than the others for a minute, "
    text += "and they waited: "
    if lag.data:
        text += "its images come late; look for what else reads from its disk or keeps its cores "
        return text + "busy"
    if recipe.shares == "auto":
        return f"{text}it gets fewer images of every batch from the next epoch on, if that lasts"
    if recipe.shares is not None:
        return f"{text}its images of every batch take longer than theirs; try shares=auto"
    text += f"it is {1 / (1 + lag.behind):.2g} times as fast: shares=auto gives up to "
    text += f"{lag.gain:.2f} times the images/s. Or see what else runs there (top), and compare "
    return text + "clocks (nvidia-smi -q, sensors)"


KINDS: dict[str, Callable[[RunState, Recipe], str | None]] = {
    "loss": _check_loss,
    "accuracy": _check_accuracy,
    "memorised": _check_memorised,
    "never predicted": _check_never_predicted,
    "cores": check_cores,
}
# Cause of a symptom. The symptom gets no warning if its cause has one.
CAUSES = {"accuracy": "loss", "memorised": "never predicted"}


def _list_balancing_overrides(recipe: Recipe) -> list[str]:
    """Return overrides that balance classes, or an empty list if the recipe balances them."""
    if recipe.data.balance or recipe.loss.class_weights is not None:
        return []
    return ["data.balance=true", "loss.class_weights=balanced"]


def _suggest(recipe: Recipe, *overrides: str, start: str = ": ") -> str:
    """Return a clause that suggests those of `overrides` that the recipe accepts; "" for none."""
    possible = keep_possible(overrides, recipe)
    if not possible:
        return ""
    return f"{start}try {' or '.join(possible)}"


def keep_possible(
    suggestions: Sequence[str],
    recipe: Recipe,
    fits: Callable[[Recipe], bool] = lambda _: True,
) -> list[str]:
    """Return the suggestions that lead to a valid recipe.

    Args:
        suggestions: Each is one override, or several that are separated by spaces.
        recipe: Recipe that the overrides change.
        fits: Function that returns whether the changed recipe is suitable. It may also raise
            RecipeError if it is not.
    """
    possible = []
    for suggestion in suggestions:
        with suppress(RecipeError):
            values = {}
            for override in suggestion.split():
                key, _, value = override.partition("=")
                values[key.replace(".", "__")] = parse_value(key, value)
            if fits(recipe.replace(**values)):
                possible.append(suggestion)
    return possible

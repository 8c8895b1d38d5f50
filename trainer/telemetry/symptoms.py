"""What goes wrong in a run, and what to type: facts in, sentences out. Pure functions.

A sentence that is wrong costs more than one that is missing: each limit says why a healthy run does not reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.devices.host import Strain
from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.recipe_files import word_value
from trainer.telemetry.rank_watch import Lag

TRIAL = 50  # steps: a run of fewer is to see whether it runs, not to learn
SAMPLES = 50  # held-out ones, and 20 of a class: of fewer a share says little
OF_CLASS = 20
STANDS = 3  # epochs without any change: one or two of them happen to a run that begins slowly
ABOVE = 1.1  # times guessing: fresh weights are less than that above it, or fall below within an epoch
GROWN = 1.5  # times the lowest: what chance does between epochs is far less
LEARNED = 0.05  # loss above its floor: 95 % of the probability is on the right class
WRONG = 0.1  # share of held-out samples: a model that generalises is below, or its training loss is not near zero
OTHERS = 0.2  # share of the cores' time: less lengthens a run by less than a quarter
BRIEF = 1.0  # seconds: what other programs do in less says nothing of a run


@dataclass(frozen=True)
class Facts:
    """What is known of a run at the end of an epoch, or of its last."""

    over: bool  # whether no more is trained
    step: int  # steps done
    steps: int  # of the whole run
    epoch_steps: int  # of an epoch
    warmup: int = 0  # the first steps, in which the learning rate rises
    losses: Sequence[float] = ()  # mean training loss of each epoch
    validation: Sequence[Mapping[str, float]] = ()  # metrics of the last epochs, up to this one
    classes: int | None = None  # outputs of a classification with the shipped loss and no class weights; None elsewhere
    names: Sequence[str] = ()  # of the classes
    actual: Sequence[int] = ()  # held-out samples of each class; empty where that is not known, as the next two
    predicted: Sequence[int] = ()  # those predicted as it
    before: Sequence[int] = ()  # those predicted as it in the epoch before
    labelled: bool = False  # whether the labels of the training images are known, so that classes can be balanced
    strain: Strain = field(default_factory=Strain)  # of the machine
    threads: int = 1  # that compute together in a process; 1 also where a GPU computes

    @property
    def guessing(self) -> float | None:
        """The loss of a model that gives all classes the same chance, also where targets are smoothed or mixed."""
        return math.log(self.classes) if self.classes and self.classes > 1 else None

    @property
    def warm(self) -> Sequence[float]:
        """Training losses of the epochs after the warm-up."""
        return self.losses[math.ceil(self.warmup / self.epoch_steps) :]


def symptoms(facts: Facts, recipe: Recipe) -> dict[str, str]:
    """What goes wrong, as sentences by their kinds."""
    found = {kind: tell(facts, recipe) for kind, tell in KINDS.items()}
    return {kind: text for kind, text in found.items() if text is not None and not found.get(CAUSES.get(kind, ""))}


def _loss(facts: Facts, recipe: Recipe) -> str | None:
    losses, warm, guess = facts.losses, facts.warm, facts.guessing
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    last, least = losses[-1], min(losses)
    # Of a loss whose size means nothing to us, only what undoes all learning is told.
    above = ABOVE * guess if guess is not None else max(losses[0], GROWN * abs(least))
    # In a warm-up a loss may begin high, and does not come back there from below.
    if last <= above or not (last > GROWN * least or (len(warm) > 1 and last > min(warm[:-1]))):
        return None
    than = f"guessing ({guess:.2f})" if guess is not None else f"at the beginning ({losses[0]:.4g})"
    gentler = _tried(
        recipe, f"optimizer.lr={_lower(recipe):g}", *["clip_grad_norm=1"] * (recipe.clip_grad_norm is None)
    )
    return f"the loss is worse than {than} and does not fall, {last:.4g} now: lower optimizer.lr{gentler}"


def _accuracy(facts: Facts, recipe: Recipe) -> str | None:
    """Where classes are balanced by the recipe, a model that is worth more may be right less often."""
    count, last = sum(facts.actual), facts.validation[-STANDS:]
    early = min(len(last), len(facts.warm)) < STANDS or facts.step - facts.warmup < TRIAL
    if early or count < SAMPLES or not _balances(recipe):
        return None
    share = max(facts.actual) / count
    entropy = -sum(n / count * math.log(n / count) for n in facts.actual if n)
    chance = math.sqrt(share * (1 - share) / count)
    if any(epoch["top1"] > share + chance for epoch in last) or facts.losses[-1] < 0.9 * entropy:
        return None
    # The held-out loss is plain: a model that knows more than the classes' shares has a smaller one, or a falling one.
    if not last[-1]["loss"] > max(0.95 * entropy, 0.98 * last[0]["loss"]):
        return None
    text = f"accuracy is stuck at {last[-1]['top1']:.0%}, and the largest class has {share:.0%} of the held-out "
    text += "images: nothing is learned"
    if facts.labelled and share >= 2 / sum(n > 0 for n in facts.actual):
        return text + _tried(recipe, *_balances(recipe))
    rates = (f"optimizer.lr={rate:g}" for rate in (_lower(recipe), 10 * recipe.optimizer.lr))
    return f"{text}{_tried(recipe, *rates)}, and check that the labels are right"


def _memorised(facts: Facts, recipe: Recipe) -> str | None:
    """Under mixed targets the lowest loss is not known."""
    mixed = recipe.augment.mixup or recipe.augment.cutmix
    if mixed or facts.classes is None or sum(facts.actual) < SAMPLES or facts.step < TRIAL or len(facts.losses) < 2:
        return None
    smooth, top1 = recipe.loss.label_smoothing / facts.classes, facts.validation[-1]["top1"]
    targets = [1 - recipe.loss.label_smoothing + smooth, *[smooth] * (facts.classes - 1)]
    floor = -sum(share * math.log(share) for share in targets if share)  # the entropy of targets smoothed so
    if max(facts.losses[-2:]) - floor > LEARNED or 1 - top1 < WRONG:
        return None
    text = f"training is perfect (loss {facts.losses[-1]:.2g}) and validation is not (top-1 {top1:.0%}): "
    others = ["augment.mixup=0.2", *["optimizer.weight_decay=0.0005"] * (recipe.optimizer.weight_decay == 0)]
    return f"{text}more images help{_tried(recipe, *others, by=', or ')}"


def _never(facts: Facts, recipe: Recipe) -> str | None:
    """Told in the second half of a run: before, hard classes are still to come."""
    if not facts.before or facts.step - facts.warmup < TRIAL or not (facts.over or 2 * facts.step > facts.steps):
        return None
    largest = max(facts.actual) / sum(facts.actual)
    if facts.validation[-1]["top1"] <= 1.5 * largest:  # what holds for most classes is no fault of some
        return None
    counted = zip(facts.actual, facts.predicted, facts.before, strict=True)
    places = [n for n, (actual, *predicted) in enumerate(counted) if actual >= OF_CLASS and not any(predicted)]
    if not places:
        return None
    names = ", ".join(facts.names[n] if n < len(facts.names) else str(n) for n in places[:5])
    text = f"no image is predicted as {names}{', ...' * (len(places) > 5)}, although the held-out images include "
    text += f"{sum(facts.actual[n] for n in places)} of {'it' if len(places) == 1 else 'them'}"
    balance = _tried(recipe, *_balances(recipe)) if facts.labelled else ""
    return text + (balance or ": check that the training images have enough and that their labels are right")


def _cores(facts: Facts, recipe: Recipe) -> str | None:
    if facts.strain.others < OTHERS or facts.strain.seconds < BRIEF:
        return None
    text = f"other programs kept the cores for {min(1.0, facts.strain.others):.0%} of the time, so speeds are "
    text += "unreliable: type top to see which, and run it again without them"
    # A thread that has no core keeps the others spinning: two of them can be far slower than one.
    return text + (_tried(recipe, "threads=1", by="; or else ") if facts.threads > 1 else "")


def slow_rank(lag: Lag, where: str, recipe: Recipe) -> str:
    """Of a rank that holds up the others, and `where` it runs."""
    text = f"rank {lag.rank} ({where}) was {lag.behind:.0%} slower than the others for a minute, and they waited: "
    if lag.data:
        return f"{text}its images come late; look for what else reads from its disk or keeps its cores busy"
    if recipe.shares == "auto":
        return f"{text}it gets a smaller part of every batch from the next epoch on, if that lasts"
    if recipe.shares is not None:
        return f"{text}its part of every batch takes longer than theirs; try shares=auto"
    share = f"it is {1 / (1 + lag.behind):.2g} times as fast: shares=auto gives up to {lag.gain:.2f} times the images/s"
    return f"{text}{share}. Or see what else runs there (top), and compare clocks (nvidia-smi -q, sensors)"


KINDS: dict[str, Callable[[Facts, Recipe], str | None]] = {
    "loss": _loss,
    "accuracy": _accuracy,
    "memorised": _memorised,
    "never predicted": _never,
    "cores": _cores,
}
CAUSES = {"accuracy": "loss", "memorised": "never predicted"}  # what needs no word, and where its cause has one


def _lower(recipe: Recipe) -> float:
    return float(f"{recipe.optimizer.lr / 10:.3g}")


def _balances(recipe: Recipe) -> list[str]:
    balanced = recipe.data.balance or recipe.loss.class_weights is not None
    return [] if balanced else ["data.balance=true", "loss.class_weights=balanced"]


def _tried(recipe: Recipe, *words: str, by: str = ": ") -> str:
    """The words to try that a recipe can have, as an end of a sentence."""
    able = possible(words, recipe)
    return f"{by}try {' or '.join(able)}" if able else ""


def possible(words: Sequence[str], recipe: Recipe, fits: Callable[[Recipe], bool] = lambda _: True) -> list[str]:
    """Those of the words, one or several settings each, that a recipe can have, and that make one that `fits`."""
    able = []
    for word in words:
        with suppress(RecipeError):
            pairs = (setting.partition("=")[::2] for setting in word.split())
            changed = recipe.replace(**{key.replace(".", "__"): word_value(key, value) for key, value in pairs})
            able += [word] * fits(changed)
    return able

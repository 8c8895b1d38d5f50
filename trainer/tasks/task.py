"""The contract of a task, and tasks by name: the ones that come with the package, and the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.known_names import Registry

Reads = Literal["class", "classes", "values"]


class Task:
    """What a model is trained for. A task of your own is a subclass with a `loss`; everything else has a default.

    Attributes:
        reads: what a table of labels says of an image: its class, its classes, or numbers.
        metric: the one of `metrics` by which the best epoch is chosen.
        larger_is_better: whether the best is the largest.
        tells: the names of all `metrics`; `loss` and `metric` by default.
        titles: what people call a metric, where that is another name.
        fractions: the metrics that are shown in percent.
        mixes: whether targets can be mixed as mixup and cutmix mix images: see `shares`.
        uses: the keys of the recipe's `loss` that the `loss` of this very class looks at. The others are refused.
        recipe: the whole recipe.
        names: of the classes, or of the predicted values.
    """

    reads: ClassVar[Reads] = "class"
    metric: ClassVar[str] = "loss"
    larger_is_better: ClassVar[bool] = False
    tells: ClassVar[tuple[str, ...]] = ()
    titles: ClassVar[Mapping[str, str]] = {}
    fractions: ClassVar[tuple[str, ...]] = ()
    mixes: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, recipe: Recipe, names: Sequence[str], targets: Tensor | None = None) -> None:
        """`targets` are the training set's, (N, ...), where they are known without reading its inputs.

        Raises:
            RecipeError: the recipe asks for what this task does not have.
        """
        self.recipe, self.names = recipe, tuple(names)
        home = next(kind for kind in type(self).__mro__ if "loss" in vars(kind))  # whose loss it is
        for key, off in (("label_smoothing", "0"), ("class_weights", "null")):
            if getattr(recipe.loss, key) and key not in vars(home).get("uses", ()):
                raise RecipeError(f"loss.{key} is not for task.name={recipe.task.name}: set loss.{key}={off}")

    @classmethod
    def metric_names(cls) -> tuple[str, ...]:
        """Of all metrics of the held-out samples."""
        return cls.tells or tuple(dict.fromkeys(("loss", cls.metric)))

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """A data set's targets (N, ...), as `loss` wants them. They come from a user: check them against the names.

        Raises:
            ValueError: they are not targets of this task, with what they must be.
        """
        return targets

    def outputs(self) -> int | None:
        """How many numbers the model gives for a sample; None where other shapes are right too."""
        return None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What training makes small: the mean over the rows of each row's own loss, 0-dim.

        So the loss of a batch is the same however it is cut into micro-batches and shards.

        Args:
            outputs: (N, ...) of the model, in float32.
            targets: (N, ...) as the data set gives them, or as `shares` under mixup and cutmix.
        """
        raise NotImplementedError

    def soft_loss(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """How far outputs are from a teacher's, times temperature^2: the mean over the rows, 0-dim."""
        raise NotImplementedError

    def label_probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """(N,) float64: the probability of each row's one class, by which wrong labels are found; None: it has no such.

        Where it is not None, `ranked` gives probabilities of classes.
        """
        return None

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What `metrics` is made of, added up over the rows: tensors of a fixed shape, under names of their own.

        They are added over batches and ranks in float64, and divided once.
        """
        return {"loss": self.loss(outputs, targets) * len(targets)}

    def metrics(self, sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
        """The metrics of `count` samples, at least one, from the sums over all of them (float64, on the CPU).

        `loss` is the first of them.
        """
        return {"loss": sums["loss"].item() / count}

    def shares(self, targets: Tensor) -> Tensor:
        """Targets (N, ...) as float32 of which a weighted mean makes sense; only where `mixes`."""
        raise NotImplementedError

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """What is predicted: of each sample (N, K) places of names, the most telling first, and a number for each.

        Raises:
            RecipeError: outputs of this task are not numbers for names.
        """
        raise RecipeError(
            f"task.name={self.recipe.task.name} has no `ranked`, which says what its outputs mean; label with "
            "trainer.predict(model, inputs, devices=...) instead, which returns the outputs themselves"
        )

    def improves(self, value: float, best: float | None) -> bool:
        """Whether `metric` is better than it ever was; NaN is worse than anything."""
        if best is None or math.isnan(best):
            return True
        return value > best if self.larger_is_better else value < best

    def shown(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """The metrics that make sense to people, by title, as text; `loss` comes first."""
        known = {self.titles.get(name, name): (name, value) for name, value in metrics.items() if value is not None}
        return {t: f"{value:.2%}" if name in self.fractions else figure(value) for t, (name, value) in known.items()}

    def text(self, metrics: Mapping[str, float | None]) -> str:
        """They in a line."""
        return "  ".join(f"{title} {text}" for title, text in self.shown(metrics).items())

    @classmethod
    def headline(cls) -> str:
        """The metric to show next to the loss: the one that chooses the best epoch, if that is another."""
        return next((name for name in (cls.metric, *cls.metric_names()) if name != "loss"), "loss")


def figure(value: float) -> str:
    """A loss or another number, for people: 0.1234, or 1.733e+19 of a run that goes astray."""
    return f"{value:.4f}" if not abs(value) >= 1e5 else f"{value:.4g}"


Kind = TypeVar("Kind", bound=type[Task])
_registered = Registry[type[Task]]("register_task")


def register_task(name: str) -> Callable[[Kind], Kind]:
    """Make a subclass of `Task` known as `task.name=name`: a decorator. Raises RecipeError for a name that is taken."""
    return _registered.register(name)


def known(name: str) -> bool:
    """Whether there is a task of that name."""
    return name in _registered


def kind(recipe: Recipe) -> type[Task]:
    """The class of the recipe's task. Raises RecipeError where there is none of that name."""
    name = recipe.task.name
    if name not in _registered:
        raise RecipeError(f"task.name={name} is not a task; known: {', '.join(_registered)}")
    return _registered[name]


def create(recipe: Recipe, names: Sequence[str], targets: Tensor | None = None) -> Task:
    """The recipe's task, for a data set's names and, where they are known, its training targets.

    Raises:
        RecipeError: there is none of that name, or the recipe asks for what it does not have.
    """
    task = kind(recipe)(recipe, names, targets)
    on = [key for key in ("mixup", "cutmix") if getattr(recipe.augment, key)]
    if on and not task.mixes:
        raise RecipeError(
            f"augment.{on[0]}={getattr(recipe.augment, on[0]):g} mixes the targets of images, and those of "
            f"task.name={recipe.task.name} do not mix: set {' '.join(f'augment.{key}=0' for key in on)}"
        )
    if recipe.distill.teacher is not None and (type(task).soft_loss is Task.soft_loss or task.outputs() is None):
        raise RecipeError(f"task.name={recipe.task.name} has no `soft_loss` of a teacher: set distill.teacher=null")
    return task

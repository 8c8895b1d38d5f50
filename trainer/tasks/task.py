"""Base class of all tasks, and the registry of tasks by name, which plugins extend."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.known_names import TASKS, Registry
from trainer.recipe.metric_table import METRICS, TOP, MetricTraits, check_metrics, find_traits
from trainer.tasks.metrics import FUNCTIONS, MetricInputs, Sums

Reads = Literal["class", "classes", "values"]
# Maximum number of outputs of all validation samples with which metrics that need all of them are
# computed by default: 4 MiB, and about 0.2 s of sorting in each evaluation.
MAX_DEFAULT_OUTPUTS = 2**20


class Task:
    """Objective that a model is trained for: the loss and the metrics.

    To add a task, write a subclass with a `loss`; everything else has a default.

    Attributes:
        reads: kind of label of an image: "class" for exactly one class, "classes" for any number of
            classes, or "values" for numbers.
        metric: name of the metric that chooses the best epoch. In an instance, the recipe's
            `task.metric`, if set, replaces the value of the class.
        larger_is_better: True if larger values of `metric` are better.
        tells: names of all metrics that the method `metrics` returns. If empty, they are "loss"
            and the name in `metric`.
        titles: display names of metrics by name. The default is the title in the table `METRICS`,
            or the name of a metric that is not in the table.
        fractions: names of metrics that are not in the table `METRICS` and are shown in percent.
        mixes: True if mixup and cutmix can mix the targets, see `shares`.
        uses: keys of the recipe's section `loss` that the method `loss` of this class reads. A
            run reports the other keys as unused if they were typed.
        measured: names of the metrics that are computed in addition to those of `metrics`, see
            `choose_metrics`.
        hidden: names of the metrics that are written to files and not shown.
        recipe: the whole recipe.
        names: names of the classes, or of the predicted values.
    """

    reads: ClassVar[Reads] = "class"
    metric = "loss"
    larger_is_better = False
    tells: ClassVar[tuple[str, ...]] = ()
    titles: ClassVar[Mapping[str, str]] = {}
    fractions: ClassVar[tuple[str, ...]] = ()
    mixes = False
    uses: ClassVar[tuple[str, ...]] = ()
    measured: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()

    def __init__(
        self,
        recipe: Recipe,
        names: Sequence[str],
        targets: Tensor | None = None,
    ) -> None:
        """Store the recipe and the names. Subclasses may read `targets`.

        Args:
            recipe: the whole recipe.
            names: names of the classes, or of the predicted values.
            targets: targets of the training set, (N, ...); None if they can only be read together
                with the inputs.
        """
        self.recipe = recipe
        self.names = tuple(names)

    @classmethod
    def uses_key(cls, key: str) -> bool:
        """Return whether the method `loss` reads the key `loss.<key>` of the recipe."""
        # A subclass with its own `loss` does not inherit `uses`, because its loss may ignore keys.
        loss_class = next(kind for kind in cls.__mro__ if "loss" in vars(kind))
        return key in vars(loss_class).get("uses", ())

    @classmethod
    def metric_names(cls) -> tuple[str, ...]:
        """Return the names of all metrics that the method `metrics` returns."""
        return cls.tells or tuple(dict.fromkeys(("loss", cls.metric)))

    @classmethod
    def list_traits(cls) -> dict[str, MetricTraits]:
        """Return the rows of the table of metrics that tasks of this class have, by name."""
        rows = {}
        for name, row in METRICS.items():
            kinds = tuple(_registered[task] for task in row.tasks if task in _registered)
            if issubclass(cls, kinds):
                rows[name] = row
        return rows

    @classmethod
    def choose_best_metric(cls, recipe: Recipe) -> tuple[str, bool]:
        """Return the name of the metric that chooses the best epoch, and if larger is better.

        Raises:
            RecipeError: the task has no metric with the name in `task.metric` or `task.metrics`, or
                only the user knows whether larger values of it are better.
        """
        rows = cls.list_traits()
        computable = [name for name in rows if name in FUNCTIONS]
        check_metrics(recipe, dict.fromkeys((*cls.metric_names(), *computable)))
        name = recipe.task.metric
        if name is None or name == cls.metric:
            return cls.metric, cls.larger_is_better
        traits = find_traits(name)
        is_known = name in ("loss", *rows) or TOP.fullmatch(name)
        if traits is None or not is_known:
            raise RecipeError(
                f"task.metric={name}: task.name={recipe.task.name} does not say whether larger "
                "values of it are better: make it the `metric` of the task's class, or register "
                "it with register_metric"
            )
        return name, traits.larger_is_better

    def choose_metrics(self, samples: int | None) -> None:
        """Set the metrics that `task.metric` and `task.metrics` select, or the defaults.

        The defaults are all metrics of the task, except those that need the outputs of all samples
        if these are too many. A subclass with its own `sums` or `metrics` has only its own metrics
        by default, because its sums may lack what other metrics need.

        Args:
            samples: number of samples of the validation split, or None if it is not known.

        Raises:
            RecipeError: see `choose_best_metric`.
        """
        metrics = self.recipe.task.metrics
        own_names = self.metric_names()
        self.metric, self.larger_is_better = self.choose_best_metric(self.recipe)
        selected = [self.metric, *(metrics or ())]
        own = type(self)
        has_shipped_sums = any(
            own.sums is shipped.sums and own.metrics is shipped.metrics
            for shipped in list_shipped()
        )
        if metrics is None and has_shipped_sums:
            outputs = (self.outputs() or 0) * (samples or 0)
            for name, row in self.list_traits().items():
                is_cheap = not row.needs_scores or 0 < outputs <= MAX_DEFAULT_OUTPUTS
                if name in FUNCTIONS and is_cheap:
                    selected.append(name)
        measured = dict.fromkeys(name for name in selected if name not in own_names)
        self.measured = tuple(measured)
        shown = {"loss", self.metric, *(metrics or own_names)}
        self.hidden = frozenset({*own_names, *measured} - shown)

    @classmethod
    def checked(cls, targets: Tensor, names: Sequence[str]) -> Tensor:
        """Check a data set's targets (N, ...) against `names`, and convert them for `loss`.

        Raises:
            ValueError: the targets do not fit this task. The message says what they must be.
        """
        return targets

    def outputs(self) -> int | None:
        """Return the number of model outputs per sample; None if the task accepts any shape."""
        return None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean of the losses of all samples, 0-dim.

        The loss of a sample must not depend on other samples, so that the loss of a batch is the
        same however the batch is divided into micro-batches and local batches.

        Args:
            outputs: outputs of the model (N, ...), in float32.
            targets: targets (N, ...) from `checked`, or from `shares` under mixup and cutmix.
        """
        raise NotImplementedError

    def soft_loss(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """Compute the mean distance between outputs and a teacher's outputs, 0-dim.

        Args:
            outputs: outputs of the model (N, ...), in float32.
            taught: outputs of the teacher (N, ...).
            temperature: divisor of both outputs before softmax. The result is multiplied by the
                square of the temperature.
        """
        raise NotImplementedError

    def label_probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the probability of the label of each sample, (N,) float64, to find wrong labels.

        A task returns None if its samples can have several classes, or if it has no classes. If a
        task returns probabilities here, its `ranked` must return probabilities of classes too.
        """
        return None

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums over all samples that `metrics` needs: named tensors of a fixed shape.

        The caller adds them over batches and ranks in float64, and `metrics` divides once.
        """
        return {"loss": self.loss(outputs, targets) * len(targets)}

    def metrics(
        self,
        sums: Sums,
        count: int,
    ) -> dict[str, float]:
        """Compute the metrics, `loss` first, from the sums over `count` samples.

        Args:
            sums: totals over the samples.
            count: number of samples, at least 1.
        """
        return {"loss": sums["loss"].item() / count}

    def split_classes(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Return, for each class, its scores (N,) in float64 and its labels (N,) as bool.

        Metrics of one class against the rest, such as AUROC, are computed from them.
        """
        raise NotImplementedError

    def build_metric_inputs(
        self,
        sums: Sums,
        count: int,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> MetricInputs:
        """Return the values from which the metrics in `measured` are computed."""
        has_one_class = self.reads == "class"
        return MetricInputs(sums, count, outputs, targets, has_one_class, self.split_classes)

    def shares(self, targets: Tensor) -> Tensor:
        """Convert targets (N, ...) to float32 values that mixup and cutmix can average.

        A task needs this method only if its attribute `mixes` is True.
        """
        raise NotImplementedError

    def to_probabilities(self, outputs: Tensor) -> Tensor:
        """Convert outputs to the probability of each class; outputs without classes are unchanged.

        Both have the shape (N, ...).
        """
        return outputs

    def average(self, views: Tensor) -> Tensor:
        """Return outputs (N, ...) whose probabilities are the means of those of several views.

        Args:
            views: outputs for several views of the same samples, such as mirror images, of shape
                (views, N, ...).

        Raises:
            RecipeError: the outputs are not probabilities of classes.
        """
        raise RecipeError(
            f"predict.tta averages probabilities of classes, which task.name="
            f"{self.recipe.task.name} does not predict: leave it out"
        )

    def ranked(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions of each sample: indices of names, and a number for each name.

        Both have the shape (N, K), with the most important name first.

        Raises:
            RecipeError: the task does not define the meaning of its outputs.
        """
        raise RecipeError(
            f"task.name={self.recipe.task.name} has no `ranked`, which says what its outputs mean; "
            "label with trainer.predict(model, inputs, devices=...) instead, which returns the "
            "outputs themselves"
        )

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether `value` of `metric` is better than `best`.

        Any number is better than no earlier value (None) or NaN. NaN is not better than anything.
        """
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        if self.larger_is_better:
            return value > best
        return value < best

    def shown(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Format metrics for display: `loss`, those that the recipe selects, then all others.

        Metrics without a value (None) are left out, and those in `hidden`. A subclass may leave out
        further metrics.

        Args:
            metrics: values by the name of the metric.

        Returns:
            The formatted values by the display name of the metric (see `titles`).
        """
        typed = self.recipe.task
        first = ("loss", typed.metric, *(typed.metrics or ()))
        names = [name for name in first if name in metrics]
        # The table may have another metric under the name of a metric that this class computes.
        own_names = {*self.metric_names()} - self.list_traits().keys()
        texts = {}
        for name in dict.fromkeys([*names, *metrics]):
            value = metrics[name]
            if value is None or name in self.hidden:
                continue
            title = name
            is_fraction = name in self.fractions
            traits = find_traits(name)
            if traits and name not in own_names:
                title = traits.title
                is_fraction = traits.is_fraction
            # "nan%" would look like a number.
            text = figure(value)
            if is_fraction and not math.isnan(value):
                text = f"{value:.2%}"
            texts[self.titles.get(name, title)] = text
        return texts

    def text(self, metrics: Mapping[str, float | None]) -> str:
        """Format the metrics in one line."""
        return "  ".join(f"{title} {text}" for title, text in self.shown(metrics).items())

    def headline(self) -> str:
        """Return the name of the metric to show next to the loss.

        The result is the metric that chooses the best epoch. If that metric is the loss, the result
        is the first other metric, or "loss" if there is no other.
        """
        for name in (self.metric, *self.metric_names()):
            if name != "loss":
                return name
        return "loss"


def figure(value: float) -> str:
    """Format a loss or another number, as in 0.1234."""
    # A run that diverges has losses such as 1.733e+19, which would have 20 digits otherwise.
    if abs(value) >= 1e5:
        return f"{value:.4g}"
    return f"{value:.4f}"


Kind = TypeVar("Kind", bound=type[Task])
_registered = Registry[type[Task]]("register_task")


def register_task(name: str) -> Callable[[Kind], Kind]:
    """Register a subclass of `Task` as `task.name=name`; use it as a decorator.

    Raises:
        RecipeError: another task has this name.
    """
    return _registered.register(name)


def list_shipped() -> tuple[type[Task], ...]:
    """Return the classes of the tasks in `TASKS`.

    Raises:
        KeyError: a task of `TASKS` is not registered.
    """
    return tuple(_registered[name] for name in TASKS)


def is_registered(name: str) -> bool:
    """Return whether a task is registered as `name`."""
    return name in _registered


def find_task_class(recipe: Recipe) -> type[Task]:
    """Return the class of the recipe's task.

    Raises:
        RecipeError: the task is not registered.
    """
    name = recipe.task.name
    if name not in _registered:
        raise RecipeError(f"task.name={name} is not a task; known: {', '.join(_registered)}")
    return _registered[name]


def create_task(
    recipe: Recipe,
    names: Sequence[str],
    targets: Tensor | None = None,
    samples: int | None = None,
) -> Task:
    """Create the recipe's task for a data set.

    Args:
        recipe: the whole recipe.
        names: the data set's names of classes or values.
        targets: targets of the training set, or None; see `Task`.
        samples: number of samples of the validation split, or None; see `Task.choose_metrics`.

    Raises:
        RecipeError: the task is not registered, or it does not support a setting of the recipe.
    """
    task = find_task_class(recipe)(recipe, names, targets)
    task.choose_metrics(samples)
    mixing_keys = [key for key in ("mixup", "cutmix") if getattr(recipe.augment, key)]
    if mixing_keys and not task.mixes:
        key = mixing_keys[0]
        remedy = " ".join(f"augment.{key}=0" for key in mixing_keys)
        raise RecipeError(
            f"augment.{key}={getattr(recipe.augment, key):g} mixes the targets of images, and "
            f"those of task.name={recipe.task.name} do not mix: set {remedy}"
        )
    if recipe.distill.teacher is not None:
        # The teacher's outputs are appended to the targets, so the number of outputs must be fixed.
        has_soft_loss = type(task).soft_loss is not Task.soft_loss
        if not has_soft_loss or task.outputs() is None:
            raise RecipeError(
                f"task.name={recipe.task.name} has no `soft_loss` of a teacher: set "
                "distill.teacher=null"
            )
    return task

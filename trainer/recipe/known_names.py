"""Names of models, data sets and tasks, checked without importing their modules.

The check runs before slow imports, so that a typo is reported immediately. It is skipped for a run
with a plugin, because the names that the plugin registers are not known yet. The package that
builds the object checks the name again. A `Registry` contains the models, data sets or tasks of
this program, and those that the user registers.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import RecipeError
from trainer.recipe.text import find_nearest

SMALL_MODELS = (
    "mlp",
    "cnn",
    "cnn_gn",
    "vit_tiny",
    "resnet8",
    "resnet20",
    "fast_cnn",
    "fast_cnn_mirrored",
    "fast_cnn_small",
    "airbench",
    "airbench_small",
)
DATASETS = (
    "digits",
    "mnist",
    "fashion_mnist",
    "cifar10",
    "cifar100",
    "imagefolder",
    "shards",
    "synthetic",
)
# Data sets that do not need files.
WITHOUT_FOLDER = ("digits", "synthetic")
# Data sets of the user's own photos, below data.root.
OWN_PHOTOS = ("imagefolder", "shards")


@dataclass(frozen=True)
class TaskRow:
    """Description of a task for pages and exported models.

    The class in `trainer.tasks` that is registered under the same name has all other properties.

    Attributes:
        labels: number and kind of the labels of an image, such as "one class".
        loss: name of the loss.
        metrics: description of the metrics; the first one chooses the best epoch.
        outputs: meaning of the model's outputs, such as "the values".
    """

    labels: str
    loss: str
    metrics: str
    outputs: str


TASKS = {
    "classification": TaskRow(
        labels="one class",
        loss="cross-entropy",
        metrics="`top1`, `top5`",
        outputs="a score for each class: softmax gives probabilities",
    ),
    "multilabel": TaskRow(
        labels="any number of classes",
        loss="binary cross-entropy, averaged over the classes",
        metrics="`f1` over all labels at probability 0.5, `f1_macro` averaged over the classes",
        outputs="a score for each label: the sigmoid gives probabilities",
    ),
    "regression": TaskRow(
        labels="one or several numbers",
        loss="mean squared error",
        metrics="`loss` (the smallest), `mae`, `r2`",
        outputs="the values",
    ),
}
# Suffixes of files with weights, of this program and others.
WEIGHTS_FILES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
# Models of torchvision with auxiliary heads. With published weights, they are built with
# transform_input=True.
AUXILIARY = ("googlenet", "inception_v3")
# Prefix of the names of timm's models.
TIMM = "timm:"


def check_model_name(name: str) -> None:
    """Check the name of a model: a small one, torchvision's, or timm's after the prefix `timm:`.

    Raises:
        RecipeError: the name is unknown. The message suggests the closest known name.
    """
    prefixed_names = [TIMM + timm_name for timm_name in timm_models()]
    if name.startswith(TIMM):
        if not prefixed_names:
            raise RecipeError(f"model.name={name} needs timm: pip install timm")
        # The name of a timm model may end with a dot and a tag of its weights. Remove the tag.
        name_without_tag = name.partition(".")[0]
        known_names = prefixed_names
        what = "no model of timm"
        hint = "timm.list_models() lists its models"
    else:
        torchvision_names = torchvision_classifiers()
        # Unknown names cannot be recognized without torchvision.
        if not torchvision_names:
            return
        name_without_tag = name
        known_names = [*SMALL_MODELS, *torchvision_names]
        what = "neither a small model nor a torchvision classifier"
        hint = f"small ones: {', '.join(SMALL_MODELS)}"
    if name_without_tag in known_names:
        return
    guess = find_nearest(name_without_tag, known_names)
    if TIMM + name in prefixed_names:
        guess = TIMM + name
    if guess:
        hint = f"did you mean model.name={guess}?"
    raise RecipeError(f"model.name={name} is {what}; {hint} (your own: plugin=my_module)")


def torchvision_classifiers() -> Sequence[str]:
    """Return the names of torchvision's classifiers."""
    pattern = r"^@register_model\(\)\n(?:@.*\n)*def (\w+)"
    return find_in_source("torchvision", "models/*.py", pattern)


def timm_models() -> Sequence[str]:
    """Return the names of timm's models, without the prefix."""
    return find_in_source("timm", "models/*.py", r"^@register_model\n(?:@.*\n)*def (\w+)")


@cache
def find_in_source(package: str, files: str, pattern: str) -> Sequence[str]:
    """Return all matches in the source of a package; empty if the package is not installed.

    Args:
        package: name of the package.
        files: glob pattern of the paths of the files, relative to the package.
        pattern: multi-line regular expression. If it has a group, a match is the text of the group.
    """
    spec = find_spec(package)
    if spec is None:
        return ()
    names = []
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob(files)):
            # Importing the package instead of reading its source would take seconds.
            names += re.findall(pattern, file.read_text(encoding="utf-8"), re.M)
    return tuple(names)


Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Dictionary of the registered objects by name."""

    def __init__(
        self,
        function: str,
        shipped: Mapping[str, Entry] | None = None,
        taken: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Create a registry that contains the `shipped` objects.

        Args:
            function: name of the decorator, for messages.
            shipped: objects of the package itself, by name.
            taken: returns further names that cannot be registered.
        """
        super().__init__(shipped or {})
        self._function = function
        self._taken = taken

    def register(self, name: str) -> Callable[[Any], Any]:
        """Return a decorator that registers an object under `name`.

        Raises:
            RecipeError: `name` is taken, or is the decorated object itself, because the decorator
                was written without a call.
        """
        if not isinstance(name, str):
            called = getattr(name, "__name__", "name")
            function = self._function
            raise RecipeError(
                f"{function} is given a name: write @{function}({called!r}), not "
                f"{type(name).__name__}"
            )
        if name in self or name in self._taken():
            raise RecipeError(f"{self._function}('{name}'): the name is taken; choose another")

        def keep(value: Entry) -> Entry:
            self[name] = value
            return value

        return keep

    @contextmanager
    def lent(self, name: str, value: Entry) -> Iterator[None]:
        """Context manager that registers `value` under `name`, even if the name is taken.

        At its end, the previous state is restored.
        """
        before = self.get(name)
        self[name] = value
        try:
            yield
        finally:
            if before is None:
                del self[name]
            else:
                self[name] = before

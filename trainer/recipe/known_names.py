"""Names of models, data sets and tasks, checked without importing what has them.

Only a first look, skipped where the user brings a plugin: the room that builds the thing has the last word.
And the registry in which users' own decorators make theirs known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.errors import RecipeError
from trainer.recipe.text import nearest

if TYPE_CHECKING:
    from trainer.recipe import Recipe

SMALL_MODELS = (
    *("mlp", "cnn", "cnn_gn", "vit_tiny", "resnet8", "resnet20"),
    *("fast_cnn", "fast_cnn_mirrored", "fast_cnn_small"),
)
DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "shards", "synthetic")
WITHOUT_FOLDER = ("digits", "synthetic")  # those that come with this program
OWN_PHOTOS = ("imagefolder", "shards")  # those that are the user's own, below data.root
TASKS = ("classification", "multilabel", "regression")
WEIGHTS_FILES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pth.tar")  # names of weights, ours and others'
AUXILIARY = ("googlenet", "inception_v3")  # torchvision's with auxiliary heads, and transform_input with its weights
TIMM = "timm:"  # before the names of timm's models


def check_names(recipe: Recipe) -> None:
    """Refuse a recipe's model, data set or task that nothing here has, with the nearest name that there is."""
    check_model_name(recipe.model.name)
    for key, name, what, known in (
        ("data.name", recipe.data.name, "a data set", DATASETS),
        ("task.name", recipe.task.name, "a task", TASKS),
    ):
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {key}={guess}? " if guess else ""
            listed = ", ".join(known)
            raise RecipeError(f"{key}={name} is not {what}; {hint}known: {listed} (your own: plugin=my_module)")


def check_model_name(name: str) -> None:
    """Refuse a model name that neither this package nor torchvision has, nor timm where it begins with timm:."""
    prefixed = name.startswith(TIMM)
    if prefixed and find_spec("timm") is None:
        raise RecipeError(f"model.name={name} needs the package timm: pip install timm")
    of_timm = [f"{TIMM}{each}" for each in timm_models()]
    others = [] if prefixed else torchvision_classifiers()
    known = of_timm if prefixed else [*SMALL_MODELS, *others]
    plain = name.partition(".")[0] if prefixed else name  # before the tag of its weights
    if (of_timm if prefixed else others) and plain not in known:
        guess = f"{TIMM}{name}" if f"{TIMM}{name}" in of_timm else nearest(plain, known)
        listed = "timm.list_models() lists its models" if prefixed else f"small ones: {', '.join(SMALL_MODELS)}"
        hint = f"did you mean model.name={guess}?" if guess else listed
        what = "no model of timm" if prefixed else "neither a small model nor a torchvision classifier"
        raise RecipeError(f"model.name={name} is {what}; {hint} (your own: plugin=my_module)")


def torchvision_classifiers() -> Sequence[str]:
    """Names of torchvision's classifiers, read from its source: importing it takes seconds."""
    return _registered("torchvision", r"^@register_model\(\)\n(?:@.*\n)*def (\w+)")


def timm_models() -> Sequence[str]:
    """Names of timm's models, without the prefix, read likewise."""
    return _registered("timm", r"^@register_model\n(?:@.*\n)*def (\w+)")


@cache
def _registered(package: str, pattern: str) -> Sequence[str]:
    """What a package's source registers; empty where it is not installed."""
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in sorted(Path(folder, "models").glob("*.py"))]
    return tuple(name for file in files for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.M))


Kept = TypeVar("Kept")


class Registry(dict[str, Kept]):
    """Names, and what each means."""

    def __init__(
        self, function: str, shipped: Mapping[str, Kept] | None = None, taken: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`function` is the decorator's name; `taken` gives names that mean something else."""
        super().__init__(shipped or {})
        self._function, self._taken = function, taken

    def register(self, name: str) -> Callable[[Any], Any]:
        """The decorator that keeps what it is given under this name.

        Raises:
            RecipeError: the name is taken, or no text, as where the brackets were forgotten.
        """
        if not isinstance(name, str):
            called, function = getattr(name, "__name__", "name"), self._function
            raise RecipeError(f"{function} is given a name: write @{function}({called!r}), not {type(name).__name__}")
        if name in self or name in self._taken():
            raise RecipeError(f"{self._function}('{name}'): the name is taken; choose another")

        def keep(value: Kept) -> Kept:
            self[name] = value
            return value

        return keep

    @contextmanager
    def lent(self, name: str, value: Kept) -> Iterator[None]:
        """Within this block the name means this, whatever else it means."""
        before = self.get(name)
        self[name] = value
        try:
            yield
        finally:
            if before is None:
                del self[name]
            else:
                self[name] = before

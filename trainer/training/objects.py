"""A program's own objects as the recipe's model and data: under their names while it trains, and on their way to ranks.

A rank that another process starts is sent whatever the recipe names and this process has registered: `model=` and
`data=` of a call, and what a script or a notebook registered by itself.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer import tasks
from trainer.data import register_dataset, registered
from trainer.errors import RecipeError
from trainer.models import zoo
from trainer.models.given import Given
from trainer.models.zoo import register_model
from trainer.processes import pickling
from trainer.recipe import DataRecipe, Recipe
from trainer.recipe.known_names import DATASETS, TASKS, torchvision_classifiers

TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
SENT, MODULE = "given.pickle", "trainer_given"  # beside the ranks' modules

Model = nn.Module | Callable[..., nn.Module] | str | Mapping[str, Any]


@contextmanager
def lent(model: Model | None, data: Any) -> Iterator[dict[str, Any]]:
    """Within this block recipes know these objects; gives the keys that name them.

    Raises:
        RecipeError: they are no model, or no data.
    """
    keys: dict[str, Any] = {}
    known = (*DATASETS, *registered.registered)
    with ExitStack() as closing:
        if isinstance(model, str | Path) and Path(model).suffix in WEIGHTS:
            raise RecipeError(
                f"model={model} is a file of weights: name the model that they are for, as in model='resnet50', and "
                f"beside it the file, model__init_from='{model}'"
            )
        if isinstance(model, str):
            keys["model.name"] = model
        elif isinstance(model, Mapping):
            keys["model"] = model
        elif model is not None:
            given = Given(model)
            name = keys["model.name"] = given.name
            if name not in torchvision_classifiers():
                keys["model.weights"] = None
                closing.enter_context(zoo.builders.lent(name, given))
        if isinstance(data, str) and (data in known or not (os.sep in data or os.path.isdir(data))):
            keys["data.name"] = data
        elif isinstance(data, str | Path):
            keys |= {"data.name": "imagefolder", "data.root": str(data)}
        elif isinstance(data, Mapping) and not any(name in data for name in TRAINING):
            keys["data"] = data
        elif data is not None:
            parts = GivenData(data)
            keys |= {"data.name": parts.name, "data.root": None, "data.labels": None}
            closing.enter_context(registered.registered.lent(parts.name, parts))
        yield keys


class GivenData:
    """The function of a data set that a program hands over."""

    def __init__(self, source: Any) -> None:
        """
        Raises:
            RecipeError: it is no pair of sets, nor a function that makes one.
        """
        self.source = source if callable(source) and not hasattr(source, "__len__") else _three(source)

    @property
    def name(self) -> str:
        if callable(self.source):
            name = getattr(self.source, "__name__", "")
        else:
            part = self.source[0]
            while hasattr(part, "dataset"):  # a Subset
                part = part.dataset
            name = type(part).__name__ if not isinstance(part, tuple | list) else ""
        name = name if name.isidentifier() else "data"
        return f"my_{name}" if name in DATASETS else name

    def __call__(self, _: DataRecipe) -> Any:
        return _three(self.source()) if callable(self.source) else self.source


def _three(source: Any) -> tuple[Any, Any, Any]:
    """Training set, held-out set, and names, their number, or None."""
    if isinstance(source, Mapping):
        sets = [next((source[name] for name in names if name in source), None) for names in (TRAINING, HELD_OUT)]
        if sets[0] is None or sets[1] is None:
            raise RecipeError(
                f"data= has {', '.join(map(str, source))}: it needs train, and validation or test; "
                "one set is cut in two by set.train_test_split(0.2) or torch.utils.data.random_split(set, [0.8, 0.2])"
            )
        return sets[0], sets[1], source.get("classes")
    if isinstance(source, tuple | list) and source and isinstance(source[0], Tensor | np.ndarray):
        raise RecipeError(
            "data= has tensors side by side: each set is a pair of its own, data=((inputs, targets), (inputs, "
            "targets)); one set is cut in two by random_split(TensorDataset(inputs, targets), [0.8, 0.2])"
        )
    if isinstance(source, tuple | list) and len(source) in (2, 3):
        return source[0], source[1], source[2] if len(source) == 3 else None
    raise RecipeError(
        f"data= is (training set, held-out set), and may have class names as a third, not {type(source).__name__}; "
        "one set is cut in two by torch.utils.data.random_split(set, [0.8, 0.2])"
    )


# --- to ranks in processes of their own -------------------------------------------------------------------------------


def sent(recipe: Recipe, plugin: str | None) -> dict[str, bytes]:
    """Files that make a rank know what this process has registered and the recipe names, by file name; the module
    `MODULE` among them is the plugin to name. Empty where all that is named comes with the package or a plugin.

    Raises:
        RecipeError: something cannot travel.
    """
    task = recipe.task.name
    kind = tasks.kind(recipe) if task not in TASKS and tasks.known(task) else None
    named = {
        "model": (recipe.model.name, zoo.registered_model(recipe.model.name)),
        "data": (recipe.data.name, registered.registered.get(recipe.data.name)),
        "task": (task, kind),
    }
    registered_here = {what: pair for what, pair in named.items() if pair[1] is not None}
    if not registered_here:
        return {}
    parts = {what: (name, pickling.packed(value, f"{what}={name}")) for what, (name, value) in registered_here.items()}
    lines = ["from trainer.training import objects", f"objects.receive(__file__, {plugin!r})"]
    return {f"{MODULE}.py": "\n".join(lines).encode(), SENT: pickle.dumps(parts)}


def receive(module: str, plugin: str | None) -> None:
    """In a rank: register what was sent, beside the plugin's own."""
    from trainer.launch.launching import load_plugin

    load_plugin(plugin)
    pickling.arrived = True
    parts: dict[str, tuple[str, bytes]] = pickle.loads(Path(module).with_name(SENT).read_bytes())
    for what, (name, content) in parts.items():
        value = pickle.loads(content)  # may import a module that registers it
        if what == "model" and zoo.registered_model(name) is None:
            register_model(name)(value)
        elif what == "data" and name not in registered.registered:
            register_dataset(name)(value)
        elif what == "task" and not tasks.known(name):
            tasks.register_task(name)(value)

"""`train` for programs: scripts, `python -`, notebooks; and their own objects as the recipe's model and data.

A rank that another process starts is sent whatever the recipe names and this process has registered.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from trainer import tasks
from trainer.data import register_dataset, registered
from trainer.errors import RecipeError
from trainer.launch import child_ranks, launching
from trainer.models import zoo
from trainer.models.given import Given, bare
from trainer.models.zoo import initialise, register_model
from trainer.processes import pickling
from trainer.recipe import DataRecipe, Recipe, load
from trainer.recipe.known_names import DATASETS, TASKS, torchvision_classifiers
from trainer.saving.weights import read_weights
from trainer.training import callbacks, loop
from trainer.training.callbacks import Callbacks, OnEpoch
from trainer.training.randomness import as_before
from trainer.training.results import Result

TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")
SENT, MODULE = "given.pickle", "trainer_given"  # beside the ranks' modules

Model = nn.Module | Callable[..., nn.Module] | str


@contextmanager
def lent(model: Model | None, data: Any) -> Iterator[dict[str, Any]]:
    """Within this block recipes know these objects; gives the keys that name them. Raises RecipeError for others."""
    keys: dict[str, Any] = {}
    known = (*DATASETS, *registered.registered)
    with ExitStack() as closing:
        if isinstance(model, str):
            keys["model.name"] = model
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
        elif data is not None:
            parts = GivenData(data)
            keys |= {"data.name": parts.name, "data.root": None, "data.labels": None}
            closing.enter_context(registered.registered.lent(parts.name, parts))
        yield keys


class GivenData:
    """The function of a data set that a program hands over."""

    def __init__(self, source: Any) -> None:
        """Raises RecipeError where it is no pair of sets, nor a function that makes one."""
        self.source = source if callable(source) and not hasattr(source, "__len__") else _three(source)

    @property
    def name(self) -> str:
        part = self.source if callable(self.source) else self.source[0]
        while hasattr(part, "dataset"):  # a Subset
            part = part.dataset
        name = "" if isinstance(part, tuple | list) else str(getattr(part, "__name__", type(part).__name__))
        name = name if name.isidentifier() else "data"
        return f"my_{name}" if name in DATASETS else name

    def __call__(self, _: DataRecipe) -> Any:
        return _three(self.source()) if callable(self.source) else self.source


def _three(source: Any) -> tuple[Any, Any, Any]:
    """Training set, held-out set, and names, their number, or None."""
    found = f"is {type(source).__name__}"
    if isinstance(source, Mapping):
        sets = [next((source[name] for name in names if name in source), None) for names in (TRAINING, HELD_OUT)]
        if all(part is not None for part in sets):
            return sets[0], sets[1], source.get("classes")
        found = f"has {', '.join(map(str, source))}, where it needs train, and validation or test"
    elif isinstance(source, tuple | list) and source and isinstance(source[0], Tensor | np.ndarray):
        found = "has tensors side by side, where each set is a pair: data=((inputs, targets), (inputs, targets))"
    elif isinstance(source, tuple | list) and len(source) in (2, 3):
        return source[0], source[1], source[2] if len(source) == 3 else None
    raise RecipeError(
        f"data= {found}: it is (training set, held-out set), and may have class names as a third; one set is cut in "
        "two by torch.utils.data.random_split(set, [0.8, 0.2])"
    )


# --- to ranks in processes of their own -------------------------------------------------------------------------------


def sent(recipe: Recipe, plugin: str | None, calls: Callbacks) -> dict[str, bytes]:
    """Files that make a rank know the callbacks, and what this process has registered and the recipe names, by file
    name; the module `MODULE` among them is the plugin to name. Empty where there is nothing to send.

    Raises:
        RecipeError: something cannot travel.
    """
    model, data, task = recipe.model.name, recipe.data.name, recipe.task.name
    kind = tasks.kind(recipe) if task not in TASKS and tasks.known(task) else None
    named = {"model": (model, zoo.registered_model(model)), "data": (data, registered.registered.get(data))}
    named["task"] = task, kind
    here = {what: pair for what, pair in named.items() if pair[1] is not None}
    parts = {what: (name, pickling.packed(value, f"{what}={name}")) for what, (name, value) in here.items()}
    if calls.wanted:
        advice = "use only what can be, or stay here, mode=single"
        parts["callbacks"] = ("", pickling.packed(calls, "on_epoch=", advice))
    if not parts:
        return {}
    lines = ["from trainer.training import api", f"api.receive(__file__, {plugin!r})"]
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
        elif what == "callbacks":
            callbacks.received = value


_here = threading.Lock()  # devices, seeds and threads are a process's, so one run at a time trains in it


def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *words: str,
    model: Model | None = None,
    data: Any = None,
    on_epoch: OnEpoch | None = None,
    nproc: int | str | None = None,
    plugin: str | None = None,
    **keywords: Any,
) -> Result:
    """Train as the recipe says and return what `result.json` holds.

    A many-process mode starts torchrun, waits for it, and passes on what it prints; everything else runs here.

        train("digits", epochs=2)
        train("my.yaml", "mode=single", optimizer__lr=0.1)
        train(model=net, data=(train_set, val_set), epochs=5, mode="ddp", nproc=2)

    Args:
        recipe: a shipped recipe's name, a YAML file, a run folder, a dictionary, or what `load_recipe` gives; None is
            every key's default.
        words: a recipe's `key=value`, as on the command line.
        model: a `torch.nn.Module`, which is trained from its present weights and has the last weights afterwards; or a
            function that makes one of those of num_classes, channels and image_size that it has parameters for; or a
            name.
        data: (training set, held-out set), or these and the names of the classes or their number; a dictionary with
            train and validation or test; a function that returns one of these; a name; or a folder of photos. Sets are
            pairs of tensors or arrays, or map-style data sets of items (input, target) or {"image": input, "label":
            target}: see `register_dataset`.
        on_epoch: called with an `EpochReport` after every epoch, in the process of rank 0, which is this one where the
            mode has one process. Returning False ends the run there, as a completed one. What it raises ends it as a
            failed one. The ranks wait for it. A process of its own is sent a copy of all that it uses.
        nproc: processes on this machine, for modes with many.
        plugin: a module that registers models, data sets or tasks.
        keywords: the recipe's keys: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr": 0.05}`.

    Raises:
        TrainerError: one of the kinds in `trainer.errors`, with the exit code that the command line would give;
            `Interrupted` after Ctrl-C, which saves.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RecipeError('a child of this script trains again: put train(...) under if __name__ == "__main__":')
    if any(not isinstance(word, str) or word.startswith(("nproc=", "plugin=")) for word in words):
        raise RecipeError("words are a recipe's, as 'epochs=2'; model=, data=, nproc= and plugin= are keywords")
    if on_epoch is not None and not callable(on_epoch):
        raise RecipeError(f"on_epoch= is a function of one report, not {type(on_epoch).__name__}")
    launching.check_plugin(plugin)
    calls, processes = Callbacks(on_epoch), None if nproc is None else str(nproc)
    with lent(model, data) as names:
        chosen = load(recipe, *words, **{**names, **keywords})
        if launching.wants_children(chosen, processes):
            given = sent(chosen, plugin, calls)
            if calls.wanted:
                note = (
                    "runs in rank 0's process: what it changes is not seen here, but report.log() brings figures back"
                )
                print(f"on_epoch: {note}", flush=True)
            module = MODULE if given else plugin
            result = cast(Result, child_ranks.train_in_children(chosen, module, processes, given))
        else:
            launching.load_plugin(plugin)
            if not _here.acquire(blocking=False):
                raise RecipeError("another train() is at work in this process: wait for it, or use a process each")
            try:
                with as_before():
                    result = loop.run(chosen, given=calls)
            finally:
                _here.release()
    file = Path(result["output"] or "", "last.safetensors")
    if isinstance(model, nn.Module) and result["status"] == "completed" and file.is_file():
        initialise(bare(model), read_weights(file)[0], str(file), whole=True)
    return result

"""`train` for programs: scripts, `python -`, notebooks; and their own objects as the recipe's model and data.

A rank that another process starts is sent whatever the recipe names and this process has registered.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
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
from trainer.recipe.known_names import DATASETS, TASKS, WEIGHTS_FILES, torchvision_classifiers
from trainer.recipe.recipe_files import split_words
from trainer.saving.weights import read_weights
from trainer.training import callbacks, loop
from trainer.training.callbacks import Callbacks, OnEpoch, OnStep
from trainer.training.randomness import as_before
from trainer.training.results import Result

TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")
SENT, MODULE = "given.pickle", "trainer_given"  # beside the ranks' modules

Model = nn.Module | Callable[..., nn.Module] | str | Mapping[str, Any]


@contextmanager
def lent(model: Model | None, data: Any) -> Iterator[dict[str, Any]]:
    """Within this block recipes know these objects; gives the keys that name them. Raises RecipeError for others."""
    keys: dict[str, Any] = {}
    known = (*DATASETS, *registered.registered)
    with ExitStack() as closing:
        if isinstance(model, str | Path) and str(model).endswith(WEIGHTS_FILES):
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
        """Raises RecipeError where it is no pair of sets, nor a function that makes one."""
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


def sent(recipe: Recipe, plugin: str | None, calls: Callbacks) -> dict[str, bytes]:
    """Files that make a rank know the callbacks, and what this process has registered and the recipe names, by file
    name; the module `MODULE` among them is the plugin to name. Empty where there is nothing to send.

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
    parts = {what: (name, pickling.packed(value, f"{what}={name}")) for what, (name, value) in registered_here.items()}
    if calls.wanted:
        for name, function in calls.functions.items():
            if isinstance(getattr(function, "__self__", None), list | dict | set | deque):
                raise RecipeError(
                    f"{name}= would fill a copy, in the process of rank 0, where callbacks run: write a function that "
                    "calls report.log(), or stay in this process, mode=single"
                )
        what = "= or ".join(calls.wanted) + "="
        parts["callbacks"] = ("", pickling.packed(calls, what, "use only what can be, or stay here, mode=single"))
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
    on_step: OnStep | None = None,
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
        words: `key=value` as on the command line.
        model: a `torch.nn.Module`, which is trained from its present weights and has the last weights afterwards; or a
            function that makes one of those of num_classes, channels and image_size that it has parameters for; or a
            name.
        data: (training set, held-out set), or these and the names of the classes or their number; a dictionary with
            train and validation or test; a function that returns one of these; a name; or a folder of photos. Sets are
            pairs of tensors or arrays, or map-style data sets of items (input, target) or {"image": input, "label":
            target}: see `register_dataset`.
        on_epoch, on_step: called in the process of rank 0, which is this one where the mode has one process, with an
            `EpochReport` after every epoch, and with a `StepReport` at every logged step (`logging__every_steps=1`: at
            each). Returning False ends the run there, as a completed one. What they raise ends it as a failed one.
            The ranks wait for them. A process of its own is sent a copy of all that they use.
        nproc: processes on this machine, for modes with many.
        plugin: a module that registers models, data sets or tasks.
        keywords: the recipe's keys: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr": 0.05}`.

    Raises:
        TrainerError: one of the kinds in `trainer.errors`, with the exit code that the command line would give;
            `Interrupted` after Ctrl-C, which saves.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RecipeError('a child of this script trains again: put train(...) under if __name__ == "__main__":')
    if isinstance(recipe, nn.Module):
        raise RecipeError("a model is given by its name: train(model=net, data=(train_set, val_set))")
    options, rest = _apart(words, nproc, plugin)
    for name, function in (("on_epoch", on_epoch), ("on_step", on_step)):
        if function is not None and not callable(function):
            raise RecipeError(f"{name}= is a function of one report, not {type(function).__name__}")
    calls = Callbacks(on_epoch, on_step)
    with lent(model, data) as names:
        chosen = load(recipe, *rest, **{**names, **keywords})
        if launching.wants_children(chosen, options["nproc"]):
            result = _in_children(chosen, options, calls)
        else:
            launching.load_plugin(options["plugin"])
            result = _in_this_process(chosen, calls)
    if isinstance(model, nn.Module):
        _give_back(model, result)
    return result


def _apart(
    words: tuple[str, ...], nproc: int | str | None, plugin: str | None
) -> tuple[dict[str, str | None], list[str]]:
    """What is not the recipe's: nproc and plugin, as keywords or words."""
    for word in words:
        if not isinstance(word, str):
            raise RecipeError(
                f"words are text, as in 'epochs=2', not {type(word).__name__}: model= and data= take objects"
            )
    launching.check_plugin(plugin)
    typed, rest = split_words(words, ("nproc", "plugin"))
    given = {"nproc": None if nproc is None else str(nproc), "plugin": plugin}
    for key, value in given.items():
        if value is not None and key in typed:
            raise RecipeError(f"{key} is given twice, as a word and as a keyword: keep one")
    return {**given, **typed}, rest


def _in_this_process(recipe: Recipe, calls: Callbacks) -> Result:
    if not _here.acquire(blocking=False):
        raise RecipeError(
            "another train() is at work in this process, whose seeds, threads and devices it uses: wait for it, or use "
            "a process each"
        )
    try:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RecipeError(
                "this process is in a process group of torch.distributed already, and train() makes its own: call it "
                "before init_process_group() or after destroy_process_group(), under torchrun, or with nproc="
            )
        with as_before():
            return loop.run(recipe, callbacks=calls)
    finally:
        _here.release()


def _in_children(recipe: Recipe, options: Mapping[str, str | None], calls: Callbacks) -> Result:
    given = sent(recipe, options["plugin"], calls)
    plugin = MODULE if given else options["plugin"]
    if calls.wanted:
        print(
            f"{' and '.join(calls.wanted)}: called in the process of rank 0, with copies of this program's variables, "
            "so what they change in them is not seen here; report.log() brings figures back",
            flush=True,
        )
    return cast(Result, child_ranks.train_in_children(recipe, plugin, options["nproc"], given))


def _give_back(model: nn.Module, result: Result) -> None:
    """The caller's own module gets the last weights."""
    file = Path(result["output"] or "", "last.safetensors")
    if result["status"] == "completed" and file.is_file():
        initialise(bare(model), read_weights(file)[0], str(file), whole=True)

"""Function `train` for scripts and notebooks, which may pass their own model and data.

If the ranks do not run in the process of the calling program, the program's callback is sent to
them, and so are the registered model, data set and task that the recipe names.
"""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainer import tasks
from trainer.data import register_dataset, registered
from trainer.errors import RecipeError
from trainer.launch import child_ranks, launching
from trainer.models import zoo
from trainer.models.given import ModelBuilder, unwrap
from trainer.processes import pickling
from trainer.processes.rank import read_place
from trainer.processes.torch_context import plain_context
from trainer.recipe import DataRecipe, Recipe, load, notes_on_idle
from trainer.recipe.known_names import DATASETS, TASKS, torchvision_classifiers
from trainer.saving.run_folder import open_check_folder
from trainer.saving.weights import read_weights
from trainer.training import callbacks, loop
from trainer.training.callbacks import Callbacks, OnEpoch, OnEvaluation, OnStep
from trainer.training.randomness import restore_global_state
from trainer.training.results import Result

# If the argument `data` of `train` is a dictionary, these are the accepted keys of the training set
# and of the validation set.
TRAINING = ("train", "training")
HELD_OUT = ("val", "valid", "validation", "test")
# Two files are sent to ranks in other processes: the pickled objects (SENT), and a plugin module
# that registers these objects (named MODULE).
SENT = "given.pickle"
MODULE = "trainer_given"

Model = nn.Module | Callable[..., nn.Module] | str


@contextmanager
def register_temporarily(model: Model | None, data: Any) -> Iterator[dict[str, Any]]:
    """Register the model and data that a program passes to `train`, until the end of this block.

    Yields:
        The keys to set in the recipe, such as `model.name`, with their values.

    Raises:
        RecipeError: `model` cannot be trained or does not build a model, or `data` has a form that
            `train` does not accept. Names are not checked here.
    """
    keys: dict[str, Any] = {}
    with ExitStack() as closing:
        if isinstance(model, str):
            keys["model.name"] = model
        elif model is not None:
            builder = ModelBuilder(model)
            name = builder.name
            keys["model.name"] = name
            if name not in torchvision_classifiers():
                keys["model.weights"] = None
                closing.enter_context(zoo.builders.lent(name, builder))
        if isinstance(data, str) and _is_dataset_name(data):
            keys["data.name"] = data
        elif isinstance(data, str | Path):
            keys |= {"data.name": "imagefolder", "data.root": str(data)}
        elif data is not None:
            dataset = GivenData(data)
            keys |= {"data.name": dataset.name, "data.root": None, "data.labels": None}
            closing.enter_context(registered.registered.lent(dataset.name, dataset))
        yield keys


def _is_dataset_name(text: str) -> bool:
    if text in DATASETS or text in registered.registered:
        return True
    return os.sep not in text and not os.path.isdir(text)


class GivenData:
    """Data set function that returns the data that a program passes to `train`."""

    def __init__(self, source: Any) -> None:
        """Store `source`: data in a form that `train` accepts, or a function that returns it.

        The result of a function is checked when the run calls it.

        Raises:
            RecipeError: `source` is neither a function nor data in a form that `train` accepts.
        """
        if callable(source) and not hasattr(source, "__len__"):
            self.source = source
        else:
            self.source = _split_source(source)

    @property
    def name(self) -> str:
        dataset = self.source if callable(self.source) else self.source[0]
        # A torch.utils.data.Subset is named after the data set that it selects from.
        while hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        if isinstance(dataset, tuple | list):
            name = ""
        else:
            name = str(getattr(dataset, "__name__", type(dataset).__name__))
        name = name if name.isidentifier() else "data"
        return f"my_{name}" if name in DATASETS else name

    def __call__(self, _: DataRecipe) -> Any:
        if callable(self.source):
            return _split_source(self.source())
        return self.source


def _split_source(source: Any) -> tuple[Any, Any, Any]:
    """Return `(training, validation, classes)` of data in one of the forms that `train` accepts.

    The first two elements are data sets. `classes` is a sequence of names, their number, or None.

    Raises:
        RecipeError: `source` is neither a mapping nor a tuple or list with both data sets.
    """
    fault = f"is {type(source).__name__}"
    if isinstance(source, Mapping):
        training = next((source[name] for name in TRAINING if name in source), None)
        validation = next((source[name] for name in HELD_OUT if name in source), None)
        if training is not None and validation is not None:
            return training, validation, source.get("classes")
        fault = f"has {', '.join(map(str, source))}, where it needs train, and validation or test"
    elif isinstance(source, tuple | list) and source and isinstance(source[0], Tensor | np.ndarray):
        fault = (
            "has tensors side by side, where each set is a pair: "
            "data=((inputs, targets), (inputs, targets))"
        )
    elif isinstance(source, tuple | list) and len(source) in (2, 3):
        names = source[2] if len(source) == 3 else None
        return source[0], source[1], names
    raise RecipeError(
        f"data= {fault}: it is (training set, held-out set), and may have class names as a third; "
        "to split one set, use torch.utils.data.random_split(set, [0.8, 0.2])"
    )


# Sending objects to ranks in other processes.


def pack_for_ranks(recipe: Recipe, plugin: str | None, calls: Callbacks) -> dict[str, bytes]:
    """Pickle the callback, and the registered objects that the recipe names, for other processes.

    Returns:
        Contents of files by name. The ranks must load the file of the module `MODULE` as a plugin.
        The dictionary is empty if there is nothing to send.

    Raises:
        RecipeError: An object cannot be pickled.
    """
    model = recipe.model.name
    data = recipe.data.name
    task = recipe.task.name
    task_kind = None
    if task not in TASKS and tasks.is_registered(task):
        task_kind = tasks.find_task_class(recipe)
    named = {
        "model": (model, zoo.find_registered(model)),
        "data": (data, registered.registered.get(data)),
        "task": (task, task_kind),
    }
    parts = {}
    for what, (name, value) in named.items():
        if value is not None:
            parts[what] = name, pickling.pickle_by_value(value, f"{what}={name}")
    if calls.wanted:
        advice = "use only objects that can be, or train in this process, with mode=single"
        names = "=, ".join(calls.wanted) + "="
        parts["callbacks"] = ("", pickling.pickle_by_value(calls, names, advice))
    if not parts:
        return {}
    source = f"from trainer.training import api\napi.receive(__file__, {plugin!r})"
    return {f"{MODULE}.py": source.encode(), SENT: pickle.dumps(parts)}


def receive(module: str, plugin: str | None) -> None:
    """Import the user's plugin, then register and store the objects that were sent to this rank.

    The model, the data set and the task are registered, and the callback is stored in `callbacks`.

    Args:
        module: Path of the file of the module `MODULE`, in the folder of the pickled objects.
        plugin: Name of the user's plugin, if any.
    """
    launching.load_plugin(plugin)
    pickling.has_received_objects = True
    file = Path(module).with_name(SENT)
    parts: dict[str, tuple[str, bytes]] = pickle.loads(file.read_bytes())
    for what, (name, content) in parts.items():
        # Unpickling may import a module that registers the object itself, so an object is only
        # registered if its name is still free.
        value = pickle.loads(content)
        if what == "model" and zoo.find_registered(name) is None:
            zoo.register_model(name)(value)
        elif what == "data" and name not in registered.registered:
            register_dataset(name)(value)
        elif what == "task" and not tasks.is_registered(name):
            tasks.register_task(name)(value)
        elif what == "callbacks":
            callbacks.received = value


# Devices, seeds and threads belong to the process, so only one run at a time trains in it.
_training_lock = threading.Lock()


@plain_context()
def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *words: str,
    model: Model | None = None,
    data: Any = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    nproc: int | str | None = None,
    plugin: str | None = None,
    check: bool = False,
    **keywords: Any,
) -> Result:
    """Train as the recipe says and return the content of `result.json`.

    If the run needs several processes, the function starts torchrun, waits for it and prints its
    output. Otherwise the run trains in the calling process.

        train("digits", epochs=2)
        train("my.yaml", "mode=single", optimizer__lr=0.1)
        train(model=net, data=(train_set, val_set), epochs=5, mode="ddp", nproc=2)

    Args:
        recipe: The name of a shipped recipe, a YAML file, a run folder, a dictionary, or a recipe
            that `load_recipe` returned. None means the defaults of all keys.
        words: Arguments `key=value` of the recipe, as on the command line.
        model: A `torch.nn.Module`: training starts from its current weights, and a completed run
            copies the final weights into it. Or a function that returns a module and accepts any of
            the parameters num_classes, channels and image_size. Or the name of a model.
        data: (training set, validation set), and optionally the names of the classes or their
            number as a third element; a dictionary with train and validation or test; a function
            that returns one of these; a name; or a folder of photos. Sets are pairs of tensors or
            arrays, or map-style data sets of items (input, target) or
            {"image": input, "label": target}: see `register_dataset`.
        on_epoch: A function that is called with an `EpochReport` after every epoch, in the process
            of rank 0. If the mode has one process, this is the calling process; otherwise rank 0
            has a copy of everything that the function uses. If the function returns False, the run
            ends as completed. If it raises, the run ends as failed. The other ranks wait until it
            returns.
        on_step: Like `on_epoch`, called with a `StepReport` after every step that is logged: every
            `logging.every_steps`-th one, and the last of each epoch.
        on_evaluation: Like `on_epoch`, called with an `EvaluationReport` after every evaluation,
            also within epochs; at the end of an epoch before `on_epoch`.
        nproc: Number of processes on this machine, for modes with several.
        plugin: Name of a module that registers models, data sets or tasks.
        check: Whether to only check the run: it trains a few steps in a temporary folder, which is
            removed, and the result has no `output`. See the guide's page `start`.
        keywords: Keys of the recipe: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr": 0.05}`.

    Returns:
        The content of `result.json`.

    Raises:
        TrainerError: The run failed or was stopped. Each type in `trainer.errors` has the exit code
            of the command line. After Ctrl-C, the run saves a checkpoint and raises `Interrupted`.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RecipeError(
            "a child process of this script calls train() again: put train(...) under "
            'if __name__ == "__main__":'
        )
    for word in words:
        if not isinstance(word, str) or word.startswith(("nproc=", "plugin=", "check=")):
            raise RecipeError(
                "positional arguments are keys of the recipe, as 'epochs=2'; model=, data=, "
                "nproc=, plugin= and check= are keywords"
            )
    calls = Callbacks(on_epoch=on_epoch, on_step=on_step, on_evaluation=on_evaluation)
    for name, function in calls.functions.items():
        if not callable(function):
            raise RecipeError(f"{name}= is a function of one report, not {type(function).__name__}")
    launching.check_plugin(plugin)
    processes = None if nproc is None else str(nproc)
    with ExitStack() as closing:
        object_keys = closing.enter_context(register_temporarily(model, data))
        keywords = object_keys | keywords
        chosen = load(recipe, *words, **keywords)
        in_children = launching.wants_children(chosen, processes)
        folder = closing.enter_context(open_check_folder(chosen, str(check).lower()))
        if in_children:
            files = pack_for_ranks(chosen, plugin, calls)
            if calls.wanted:
                print(
                    f"{', '.join(calls.wanted)}: runs in rank 0's process, so objects that it "
                    "changes stay as they are here; use report.log() to return values",
                    flush=True,
                )
            module = MODULE if files else plugin
            answer = child_ranks.train_in_children(chosen, module, processes, files, folder)
            result = cast(Result, answer)
        else:
            launching.load_plugin(plugin)
            if read_place().is_main:
                for line in notes_on_idle(recipe, *words, **keywords):
                    print(f"unused: {line}", flush=True)
            if not _training_lock.acquire(blocking=False):
                raise RecipeError(
                    "another train() runs in this process: wait until it ends, or use a process "
                    "for each"
                )
            try:
                with restore_global_state():
                    result = loop.run(chosen, program_callbacks=calls, check=folder)
            finally:
                _training_lock.release()
    if folder:
        result["output"] = None
        return result
    file = Path(result["output"] or "", "last.safetensors")
    if isinstance(model, nn.Module) and result["status"] == "completed" and file.is_file():
        # A module that was created under inference_mode can only be written to in that mode.
        is_inference = any(parameter.is_inference() for parameter in model.parameters())
        with torch.inference_mode(is_inference):
            weights, _ = read_weights(file)
            zoo.load_weights(unwrap(model), weights, str(file), whole=True)
    return result

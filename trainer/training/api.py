"""`train` for programs: scripts, `python -`, notebooks."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from trainer.errors import RecipeError
from trainer.launch import hosted, launching
from trainer.models.given import bare
from trainer.models.zoo import initialise
from trainer.recipe import Recipe, load
from trainer.recipe.recipe_words import split_words
from trainer.saving.weights import read_weights
from trainer.training import loop, objects
from trainer.training.callbacks import Callbacks, OnEpoch, OnStep
from trainer.training.objects import Model
from trainer.training.randomness import as_before
from trainer.training.results import Result

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
        on_epoch, on_step: called in this process with an `EpochReport` after every epoch, and with a `StepReport` at
            every logged step (`logging__every_steps=1`: at each). Returning False ends the run there, as a completed
            one. What they raise ends it as a failed one, and is raised here. The ranks wait for them; in a script that
            torchrun runs, rank 0's are called.
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
    callbacks = Callbacks(on_epoch, on_step)
    with objects.lent(model, data) as names:
        chosen = load(recipe, *rest, **{**names, **keywords})
        if launching.wants_children(chosen, options["nproc"]):
            result = _in_children(chosen, options, callbacks)
        else:
            launching.load_plugin(options["plugin"])
            result = _in_this_process(chosen, callbacks)
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


def _in_this_process(recipe: Recipe, callbacks: Callbacks) -> Result:
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
            return loop.run(recipe, callbacks=callbacks)
    finally:
        _here.release()


def _in_children(recipe: Recipe, options: Mapping[str, str | None], callbacks: Callbacks) -> Result:
    given = objects.sent(recipe, options["plugin"])
    plugin = objects.MODULE if given else options["plugin"]
    wanted = callbacks.wanted()
    answer = callbacks.answer if wanted else None
    return cast(Result, hosted.train_in_children(recipe, plugin, options["nproc"], given, answer, wanted))


def _give_back(model: nn.Module, result: Result) -> None:
    """The caller's own module gets the last weights."""
    file = Path(result["output"] or "", "last.safetensors")
    if result["status"] == "completed" and file.is_file():
        initialise(bare(model), read_weights(file)[0], str(file), whole=True)

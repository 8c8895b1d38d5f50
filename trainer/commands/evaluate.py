"""A trained run, evaluated again: from its files alone, on other data or other devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator

from trainer import modes
from trainer import recipe as recipes
from trainer.data import Datasets, Loader, open_datasets
from trainer.data.cache import as_stored
from trainer.data.folders.layout import Before, part_of
from trainer.errors import CheckpointError, RecipeError
from trainer.models.extra_state import load_extra_state
from trainer.models.zoo import fitted
from trainer.modes import Context
from trainer.processes.resources import locate
from trainer.processes.terminal import say
from trainer.processes.world import PATIENCE
from trainer.recipe import Recipe
from trainer.recipe.checks import check_processes
from trainer.recipe.known_names import WITHOUT_FOLDER
from trainer.recipe.loading import load_stored
from trainer.recipe.recipe_files import split_words
from trainer.recipe.schema import LARGEST_SIDE
from trainer.saving.run_names import run_named
from trainer.saving.tensor_files import whole
from trainer.saving.weights import read_metadata, read_weights
from trainer.tasks.classification import class_name
from trainer.training.evaluation import evaluate, metrics_of, replayed
from trainer.training.initial_model import model_of
from trainer.training.same_images import check_same_images
from trainer.training.setup import start_process, task_of


def evaluate_run(checkpoint: str | Path, *words: str) -> dict[str, float]:
    """Evaluate a trained run again, in this process or as one of torchrun's ranks.

    Args:
        checkpoint: a run folder (its last weights) or its name below runs, one of its checkpoints, or a .safetensors
            file of it.
        words: `key=value` on top of the run's own recipe: where the data is, another batch size, devices; and
            split=test for the images of a test part, which no run looks at where there is a val part too.

    Returns:
        What `evaluate` returns, on every rank; of split=test as test_loss and so on.

    Raises:
        RecipeError: it is no path, or the words mean nothing.
        CheckpointError: no such checkpoint, or no recipe with it.
    """
    if not isinstance(checkpoint, str | Path):
        given = f"not {type(checkpoint).__name__}"
        raise RecipeError(f"evaluate() takes a run's folder or file of weights, as in evaluate('runs/x'), {given}")
    path = run_named(str(checkpoint))
    options, settings = split_words(words, ("split",))
    part = options.get("split", "val")
    if part not in ("val", "test"):
        raise RecipeError(f"split={part[:40]}: evaluate takes split=val (the default) or split=test")
    weights, metadata = read_weights(path)
    recipe = recipe_of(path, metadata, settings)
    start_process(recipe)
    world = locate(recipe)
    rows = -(-recipe.batch_size // world.size)  # padding makes any number of images fit
    augment = {"crop": recipe.augment.crop}  # tells whether photos are read as they are needed
    recipe = recipe.replace(
        mode="single" if world.size == 1 else "ddp", batch_size=rows * world.size, accumulate=1, augment=augment
    )
    check_processes(recipe, world.size)
    world.connect(recipe.timeout)
    data = world.all_or_none(lambda: opened_again(path, recipe, metadata, part == "test"), PATIENCE)
    check_same_images(world, data)
    task = task_of(recipe, data)
    model = model_of(recipe, task, data, starting=False)
    load_extra_state(model, weights, str(path))
    weights = fitted(model, weights, str(path), whole=True)
    strategy = modes.create(Context(recipe, world, task, data.example(rows)))
    strategy.setup(model)
    strategy.scatter(whole(weights), {**strategy.named_parameters(), **strategy.named_buffers()})
    loader = Loader(data, recipe, task, strategy.shard, world.device, world.place.local_size)
    forward = replayed(strategy, lambda line: say(line) if world.is_main else None)
    forward.begin(loader.evaluation_batches)
    metrics = evaluate(strategy, loader.evaluation(), world, forward=forward)
    forward.close()
    skipped = int(world.sum_(torch.tensor([float(loader.skipped)])).item())
    loader.close()
    if world.is_main:
        scores = task.text(metrics_of(metrics))
        images = f"{metrics['val_samples']:,} {'test' if part == 'test' else 'held-out'} images of {data.name}"
        images += f"; {skipped:,} more cannot be read" if skipped else ""
        say(f"{path}: {part} {scores} on {images}")
    world.barrier()
    world.close()
    return {f"{part}_{key.removeprefix('val_')}": value for key, value in metrics.items()}


def opened_again(path: Path, recipe: Recipe, metadata: Mapping[str, str], test: bool = False) -> Datasets:
    """The data set of weights at `path`, with the images held out that their run held out; or those of a `test` part.

    A split that the run made is in its folder, or drawn again from its seed. Of other images without a split, in
    another folder than the run's, all are held out. Raises CheckpointError.
    """
    elsewhere = recipe.data.root != recipe_of(path, metadata, ()).data.root
    data = open_datasets(recipe, Before(part_of(path, "val"), elsewhere, test))
    facts = metadata if "classes" in metadata else read_metadata(path)
    try:
        known = tuple(class_name(str(name)) for name in json.loads(facts.get("classes", "null")) or data.classes)
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: its description of the classes makes no sense") from None
    if known != data.classes:
        raise CheckpointError(f"{path} was trained on {_listed(known)}, and {data.split} holds {_listed(data.classes)}")
    return as_stored(data, recipe)


def _listed(classes: tuple[str, ...]) -> str:
    return f"{len(classes)} classes ({', '.join(classes[:8])}{', ...' * (len(classes) > 8)})"


def recipe_of(path: Path, metadata: Mapping[str, str], words: Sequence[str]) -> Recipe:
    """The recipe that weights were trained with: from their file, else from the run folder they lie in.

    Its devices were those of the training; evaluation takes what is here, or what the words say.
    """
    anywhere = {"devices": "auto", "mode": "ddp"}
    if "recipe" in metadata:
        run_folder = next((folder for folder in (path, path.parent) if (folder / "recipe.yaml").is_file()), None)
        try:
            written = load_stored(
                json.loads(metadata["recipe"]), str(run_folder / "recipe.yaml" if run_folder else path)
            )
            # Weights tell no paths, their run's folder does; a damaged one is no matter where none is read.
            if run_folder is not None and written.data.name not in WITHOUT_FOLDER:
                data = recipes.load(str(run_folder / "recipe.yaml")).data
                written = written.replace(
                    data__root=data.root, data__labels=data.labels, data__cache_dir=data.cache_dir
                )
        except (ValueError, TypeError, RecursionError) as error:  # a RecipeError too
            raise CheckpointError(f"{path} holds a recipe that cannot be used ({error})") from None
        return recipes.load({**written.to_dict(), **anywhere}, *words)
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / "recipe.yaml").is_file():
            return recipes.load({**recipes.load(str(folder / "recipe.yaml")).to_dict(), **anywhere}, *words)
    raise CheckpointError(f"{path} has no recipe with it; give a run folder, as in checkpoint=runs/x")


class ImageFacts(BaseModel):
    """What weights tell of their classes and images, within bounds: the file may be damaged, or anyone's."""

    classes: Annotated[tuple[str, ...], Field(max_length=2**20)]
    mean: tuple[Annotated[float, Field(ge=-1e3, le=1e3, allow_inf_nan=False)], ...]
    std: tuple[Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)], ...]
    image_size: Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
    shorter_side: Annotated[int, Field(ge=1, le=LARGEST_SIDE)] | None = None  # older files do not tell it
    channels: Literal[1, 3]

    @model_validator(mode="after")
    def _fits(self) -> ImageFacts:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError("mean and std have a different number of channels")
        if not self.image_size <= (self.shorter_side or self.image_size) <= 2 * self.image_size:
            raise ValueError("the crop is outside the image, or covers hardly any of it")
        return self

    @classmethod
    def of(cls, path: Path, facts: Mapping[str, str]) -> ImageFacts:
        """Raises CheckpointError."""
        try:
            known = (f'"{key}":{facts[key]}' for key in cls.model_fields if key in facts)
            return cls.model_validate_json("{" + ",".join(known) + "}")
        except ValidationError:
            raise CheckpointError(f"{path} is damaged: its description of the images makes no sense") from None


def facts_of(path: Path, facts: dict[str, str]) -> dict[str, str]:
    """What weights were trained on, by their file or by that of their run's folder. Raises CheckpointError."""
    for folder in (None, *path.absolute().parents[:2]):
        if folder is not None and (folder / "last.safetensors").is_file():
            facts = read_metadata(folder)
        if "classes" in facts:
            return facts
    raise CheckpointError(f"{path} does not name its classes; give a run folder or its last.safetensors")

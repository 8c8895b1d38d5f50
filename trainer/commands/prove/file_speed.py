"""Speed of reading photos and of saving, each next to the plain PyTorch way."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer import recipe as recipes
from trainer.commands.trials.measuring import in_turn, seconds
from trainer.data import Loader, Shard, open_datasets
from trainer.models.zoo import build
from trainer.processes import fork_server
from trainer.recipe.schema import ModelRecipe
from trainer.saving import checkpoint
from trainer.saving.checkpoint import Position, State
from trainer.training.setup import task_of

if TYPE_CHECKING:
    from trainer.commands.prove.prove_probe import Measurer

PAIRS = 3
PHOTOS, NAMES, SHAPE = 64, 24, (400, 500, 3)  # files, the names that each has, their pixels
BATCH, WARM, SECONDS = 32, 4, 1.5  # images; batches before timing


def save(here: Measurer) -> dict[str, Any]:
    """Seconds of our checkpoint, which is hashed and read again, and of torch.save, of as many bytes."""
    model = build(ModelRecipe(name=here.task["model"]), 1000, 3, 224)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    momentum = {f"{name}//momentum_buffer": torch.rand_like(p) for name, p in model.named_parameters()}
    path = here.folder / "plain.pt"

    def ours_takes(turn: int) -> float:
        state = State(Position(turn + 1, 0, turn + 1), {"model": weights, "optimizer": momentum}, {})
        return seconds(lambda: checkpoint.commit(here.folder, state, 2))

    plain = {**weights, **momentum}
    ours, bare = in_turn(PAIRS, ours_takes, lambda turn: seconds(lambda: _torch_save(path, plain)))
    shutil.rmtree(here.folder / "checkpoints")
    path.unlink()
    return {"ours": ours, "bare": bare, "bytes": sum(t.nbytes for t in (*weights.values(), *momentum.values()))}


def _torch_save(path: Path, tensors: dict[str, Tensor]) -> None:
    """As carefully as it has to be: a file that is on the disk before it has its name."""
    with path.with_suffix(".tmp").open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)


def readers(here: Measurer) -> dict[str, Any]:
    """Photos/s of our readers and of torchvision's training pipeline with as many processes, in turn."""
    size, root = here.task["size"], here.folder / "photos"
    _make(root)
    words = [f"data.root={root}", f"data.image_size={size}", f"batch_size={BATCH}", "mode=single"]
    recipe = recipes.load(None, *words, "data.name=imagefolder", "augment.crop=resized", "augment.hflip=0.5")
    data = open_datasets(recipe)
    loader = Loader(data, recipe, task_of(recipe, data), Shard(), here.device)
    ours, bare = in_turn(
        PAIRS,
        lambda turn: _photos_per_sec(loader.training(turn)),
        lambda turn: _photos_per_sec(iter(_torchvision(root, size, loader.workers or 0))),
    )
    loader.close()
    shutil.rmtree(root)
    return {"ours": ours, "bare": bare, "processes": loader.workers}


def _make(root: Path) -> None:
    """Files that are as hard to decode as photos: rough shapes with fine noise."""
    generator = np.random.default_rng(0)
    for number in range(PHOTOS):
        rough = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        shapes = np.asarray(Image.fromarray(rough).resize(SHAPE[1::-1], Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(shapes + generator.integers(-12, 13, SHAPE), 0, 255).astype(np.uint8)
        folder = root / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / f"{number}.jpg"
        Image.fromarray(noisy).save(first, quality=90)
        for name in range(1, NAMES):
            os.link(first, folder / f"{number}-{name}.jpg")
    for label in range(2):
        (root / "val" / f"class{label}").mkdir(parents=True)
        os.link(root / "train" / f"class{label}" / f"{label}.jpg", root / "val" / f"class{label}" / "0.jpg")


def _torchvision(root: Path, size: int, workers: int) -> Any:
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    photos = datasets.ImageFolder(str(root / "train"), transforms.Compose(steps))
    context = fork_server.context() if workers else None
    return DataLoader(photos, BATCH, True, num_workers=workers, drop_last=True, multiprocessing_context=context)


def _photos_per_sec(batches: Iterator[Any]) -> float:
    """Once the readers are at work."""
    for _ in range(WARM):
        next(batches)
    begun, photos = time.perf_counter(), 0
    for _ in batches:
        photos += BATCH
        if time.perf_counter() - begun > SECONDS:
            break
    return photos / (time.perf_counter() - begun)

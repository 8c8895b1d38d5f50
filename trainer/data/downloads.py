"""torchvision's small sets, in the data folder or downloaded there by one process a node.

The data folder is `data.root`, else $TRAINER_DATA, else ~/.cache/trainer.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as published

from trainer.data.photos.decoding import reason
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks

PATIENCE = 30  # seconds without a byte before a download is given up
Split = tuple[Tensor, Tensor]  # images (N, C, H, W) uint8, labels (N,) int64


class Published(NamedTuple):
    """A data set of torchvision's."""

    maker: Any
    folder: str  # what torchvision expects in the data folder
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10, CIFAR100 = published.CIFAR10, published.CIFAR100
PUBLISHED = {
    "mnist": Published(published.MNIST, "MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": Published(published.FashionMNIST, "FashionMNIST", (0.2860,), (0.3530,)),
    "cifar10": Published(CIFAR10, "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Published(CIFAR100, "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def data_folder(data: DataRecipe) -> Path:
    """Where published sets live."""
    return Path(data.root or os.environ.get("TRAINER_DATA") or "~/.cache/trainer").expanduser()


def load_published(data: DataRecipe) -> tuple[Split, Split, tuple[str, ...]]:
    """(training set, held-out set, class names), downloaded where that is needed and allowed. Raises SetupError."""
    known, root = PUBLISHED[data.name], data_folder(data)
    loaded = _load(known, root)
    why = "data.download=false"
    if loaded is None and data.download:
        try:
            with locks.in_turn(root, f".{data.name}.lock"):  # other ranks have downloaded it meanwhile
                loaded = _load(known, root) or _download(known, root, data.name)
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            why = f"the download failed: {reason(error)}"
    if loaded is None:
        raise SetupError(
            f"{data.name} is not in {root} ({why}); put the {known.folder}/ there that torchvision downloads, "
            "or type data.root=FOLDER where it is"
        )
    return loaded


def _load(known: Published, root: Path) -> tuple[Split, Split, tuple[str, ...]] | None:
    """The set in `root`; None where it is missing or incomplete."""
    if not (root / known.folder).is_dir():
        return None
    try:
        train, val = known.maker(root, train=True), known.maker(root, train=False)
    except RuntimeError:  # torchvision: files are missing or have the wrong checksum
        return None
    except (OSError, ValueError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        raise SetupError(f"{root / known.folder} cannot be read ({reason(error)}); remove it and start again") from None
    return _tensors(train), _tensors(val), tuple(train.classes)


def _tensors(data: Any) -> Split:
    pixels = torch.as_tensor(data.data)  # (N, H, W) or (N, H, W, C)
    if pixels.dim() == 3:
        pixels = pixels[..., None]
    return pixels.permute(0, 3, 1, 2), torch.as_tensor(np.asarray(data.targets), dtype=torch.int64)


def _download(known: Published, root: Path, name: str) -> tuple[Split, Split, tuple[str, ...]] | None:
    """Download into a temporary folder and rename it, so that a killed process leaves nothing that looks complete."""
    for left_over in root.glob(f".{name}-*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    draft = root / f".{name}-{os.getpid()}.tmp"
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        draft.mkdir()
        for train in (True, False):
            known.maker(draft, train=train, download=True)
        shutil.rmtree(root / known.folder, ignore_errors=True)  # an incomplete one
        os.replace(draft / known.folder, root / known.folder)
    finally:
        socket.setdefaulttimeout(timeout)
        shutil.rmtree(draft, ignore_errors=True)
    return _load(known, root)

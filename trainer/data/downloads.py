"""Published data sets of torchvision, read from the data folder or downloaded to it.

The data folder is `data.root`, else $TRAINER_DATA, else ~/.cache/trainer. One process at a time
downloads to it: the others wait for its lock and then read the files.
"""

import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision import datasets as published

from trainer.data.photos.decoding import describe_failure
from trainer.errors import SetupError
from trainer.recipe import DataRecipe
from trainer.saving import locks

# Number of seconds without a received byte after which a download fails.
PATIENCE = 30
# Images (N, C, H, W) uint8 and labels (N,) int64.
Split = tuple[Tensor, Tensor]
# Training set, validation set, class names.
Loaded = tuple[Split, Split, tuple[str, ...]]


class Published(NamedTuple):
    """A data set of torchvision.

    Attributes:
        maker: torchvision's class of the data set, such as `torchvision.datasets.MNIST`.
        folder: name of the folder in the data folder in which torchvision expects the files.
        mean: mean of each channel, for pixels in [0, 1].
        std: standard deviation of each channel.
    """

    maker: Any
    folder: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


PUBLISHED = {
    "mnist": Published(published.MNIST, "MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": Published(published.FashionMNIST, "FashionMNIST", (0.2860,), (0.3530,)),
    "cifar10": Published(
        published.CIFAR10, "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "cifar100": Published(
        published.CIFAR100, "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
}


def get_data_folder(root: str | None = None) -> Path:
    """Return the data folder, as the docstring of this module defines it; `root` is data.root."""
    return Path(root or os.environ.get("TRAINER_DATA") or "~/.cache/trainer").expanduser()


def load_published(data: DataRecipe) -> Loaded:
    """Return (training set, validation set, class names), downloaded if needed and allowed.

    Raises:
        SetupError: the files are missing or cannot be read.
    """
    source = PUBLISHED[data.name]
    root = get_data_folder(data.root)
    loaded = _load(source, root)
    why = "data.download=false"
    if loaded is None and data.download:
        try:
            with locks.wait_for_lock(root, f".{data.name}.lock"):
                # Another rank may have downloaded the files while this one waited.
                loaded = _load(source, root) or _download(source, root, data.name)
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            why = f"the download failed: {describe_failure(error)}"
    if loaded is None:
        raise SetupError(
            f"{data.name} is not in {root} ({why}): put the {source.folder}/ that torchvision "
            "downloads there, or type data.root=FOLDER of the folder that contains it"
        )
    return loaded


def _load(source: Published, root: Path) -> Loaded | None:
    """Read the data set from `root`; return None if it is missing or incomplete."""
    if not (root / source.folder).is_dir():
        return None
    try:
        train = source.maker(root, train=True)
        val = source.maker(root, train=False)
    except RuntimeError:
        # torchvision raises this error if files are missing or have the wrong checksum. The caller
        # may then download them again.
        return None
    except (OSError, ValueError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        raise SetupError(
            f"{root / source.folder} cannot be read ({describe_failure(error)}): remove it and "
            "start again"
        ) from None
    return _to_tensors(train), _to_tensors(val), tuple(train.classes)


def _to_tensors(data: Any) -> Split:
    # Pixels are (N, H, W) or (N, H, W, C).
    pixels = torch.as_tensor(data.data)
    if pixels.dim() == 3:
        pixels = pixels[..., None]
    labels = torch.as_tensor(data.targets, dtype=torch.int64)
    return pixels.permute(0, 3, 1, 2), labels


def _download(
    source: Published,
    root: Path,
    name: str,
) -> Loaded | None:
    """Download the data set into a temporary folder, rename the folder, and read the data set.

    If the process is killed, it therefore leaves no folder that looks complete.
    """
    for left_over in root.glob(f".{name}-*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    draft = root / f".{name}-{os.getpid()}.tmp"
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        draft.mkdir()
        for train in (True, False):
            source.maker(draft, train=train, download=True)
        # An incomplete folder from an earlier download would prevent the renaming.
        shutil.rmtree(root / source.folder, ignore_errors=True)
        os.replace(draft / source.folder, root / source.folder)
    finally:
        socket.setdefaulttimeout(timeout)
        shutil.rmtree(draft, ignore_errors=True)
    return _load(source, root)

"""Whether all ranks read the same images: machines may hold different copies, and files may come while a run starts."""

from __future__ import annotations

import platform
from typing import Any

from trainer.data import Datasets
from trainer.data.encoded import EncodedPhotos
from trainer.data.scanning import few
from trainer.errors import SetupError
from trainer.processes.world import World


def check_same_images(world: World, data: Datasets) -> None:
    """Hold what this rank found against what rank 0 found. Collective.

    Raises:
        SetupError: on every rank, where one found something else.
    """
    found = world.gather((platform.node(), _told(data)))
    odd = next((rank for rank, (_, told) in enumerate(found) if told != found[0][1]), None)
    why = world.share(None if odd is None else _difference(odd, found[odd], found[0][1]))
    if why is not None:
        kept = ", and the run folder if it is continued: its split.csv tells what it holds out"
        raise SetupError(
            f"{why}: every machine needs the same files in data.root" + kept * (data.split_table is not None)
        )


def _told(data: Datasets) -> dict[str, Any]:
    parts = (data.train, data.val)
    return {
        "training images": f"{len(data.train):,}",
        "held-out images": f"{len(data.val):,}",
        "classes": f"{len(data.classes)} ({few(data.classes)})",
        "shape": " x ".join(map(str, data.inputs.shape)),
        "files": [part.digest() for part in parts if isinstance(part, EncodedPhotos)],
    }


def _difference(rank: int, its: tuple[str, dict[str, Any]], here: dict[str, Any]) -> str:
    host, there = its
    what = next(key for key in here if there[key] != here[key])
    if what == "files":
        return f"rank {rank} on {host} trains on other files than rank 0, or holds out others"
    return f"rank {rank} on {host} found other data than rank 0 ({what}: {there[what]} there, {here[what]} here)"

"""Damaged photos, found before the first step instead of minutes later, by the beginning and the end of each file.

Ranks share the photos, and threads wait for the disk together. What does not look whole is decoded as for evaluation,
so that no photo is called damaged which could be read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import numpy as np
from PIL import Image

from trainer.data.encoded import EncodedPhotos
from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos.decoding import formats, reason, without_warnings
from trainer.data.photos.photo_reader import held_out
from trainer.data.sets import Datasets, ImageSet
from trainer.processes.world import DATA_PATIENCE, World
from trainer.recipe import Recipe
from trainer.saving import files
from trainer.saving.files import csv_text, portable
from trainer.telemetry.tracking import Progress

SKIPPED_FILE = "skipped.csv"  # of a run folder: the damaged photos
HEADER = ("file", "split", "reason")
TOGETHER, WAITING = 256, 16  # photos of a piece of work, and threads, which mostly wait for the disk
ENDS = 4096  # bytes that tell what kind of file begins or ends there; programs append a few to a JPEG
JPEG, PNG, WEBP = (b"\xff\xd8", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"), (b"RIFF", b"WEBP")

Damaged = tuple[str, str, str]  # train or val, path, reason


def without_damage(data: Datasets, recipe: Recipe, world: World) -> Datasets:
    """The same set, with what was found to be damaged in `damaged` and in a note, the same on every rank. Collective.
    Raises SetupError.
    """
    mine = world.all_or_none(lambda: _look(data, recipe, world), DATA_PATIENCE)
    damaged = tuple(world.broadcast_object(sorted(file for part in world.gather(mine) for file in part)))
    if not damaged:
        return data
    if recipe.data.on_error == "stop":
        raise unreadable([(path, why) for _, path, why in damaged], len(data.train) + len(data.val))
    held = sum(split == "val" for split, *_ in damaged)
    parts = [f"{count:,} {kind}" for count, kind in ((len(damaged) - held, "training"), (held, "held-out")) if count]
    note = f"{' and '.join(parts)} photos are damaged: see {SKIPPED_FILE}"
    return replace(data, damaged=damaged, notes={**data.notes, "skipped": note})


def table(damaged: Sequence[Damaged]) -> str:
    """The text of skipped.csv."""
    return csv_text([HEADER, *((portable(path), split, why) for split, path, why in damaged)])


def _look(data: Datasets, recipe: Recipe, world: World) -> list[Damaged]:
    """What this rank finds in its share; of sets in memory, which every rank has decoded, rank 0 tells."""
    damaged: list[Damaged] = []
    shares: list[tuple[str, EncodedPhotos, Sequence[int]]] = []
    for split, part in (("train", data.train), ("val", data.val)):
        if isinstance(part, ImageSet) and world.is_main:
            damaged += [(split, path, why) for path, why in part.failures]
        elif isinstance(part, EncodedPhotos) and recipe.data.check != "off":
            share = np.array_split(np.arange(len(part)), world.size)[world.rank].tolist()
            shares += [(split, part, share[at : at + TOGETHER]) for at in range(0, len(share), TOGETHER)]
    progress = Progress(
        sum(len(share) for *_, share in shares), recipe.logging.progress and world.is_main, "check", "photo"
    )
    pool = ThreadPoolExecutor(WAITING)
    try:
        with without_warnings():
            asked = {pool.submit(_unreadable, *each, data): len(each[2]) for each in shares}
            for done in as_completed(asked):
                damaged += done.result()
                progress.more(asked[done])
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()
    return damaged


def _unreadable(split: str, part: EncodedPhotos, share: Sequence[int], data: Datasets) -> list[Damaged]:
    """Those of a share that do not look whole and cannot be read, and why."""
    damaged = []
    for index in share:
        if not looks_whole(part.address(index)):
            try:
                held_out(part.open(index, data.channels)[0], data.image_size)
            except Exception as error:  # decoders raise anything at all
                damaged.append((split, part.where(index), reason(error)))
    return damaged


def looks_whole(address: bytes) -> bool:
    """Whether an image file begins and ends as its kind does, or can at least be opened. Of those in shards, which
    are read as wholes, nobody looks."""
    if b"\0" in address:
        return True
    try:
        with files.opened(address) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ENDS))
            last = file.read(ENDS)
            file.seek(0)
            first = file.read(ENDS)
            if first.startswith(JPEG[0]):
                return JPEG[1] in last  # within a JPEG's pixels it cannot be
            if first.startswith(PNG[0]):
                return last.endswith(PNG[1])
            if first.startswith(WEBP[0]) and first[8:12] == WEBP[1]:
                return int.from_bytes(first[4:8], "little") + 8 <= size
            file.seek(0)
            with Image.open(file, formats=formats()):
                return True
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False

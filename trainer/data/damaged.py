"""Damaged photos, found before the first step instead of minutes later: a look at the beginning and the end of each
file, or all of them decoded.

Ranks share the photos, and threads wait for the disk together. What does not look whole is decoded as for evaluation,
so that no photo is called damaged which could be read. Where all are decoded, what libjpeg complains of is damaged too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image

from trainer.data.encoded import EncodedPhotos, encoded, ends, header_file
from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos import libjpeg
from trainer.data.photos.decoding import formats, reason, without_warnings
from trainer.data.photos.photo_reader import held_out
from trainer.data.sets import Datasets, ImageSet
from trainer.processes.resources import cores
from trainer.processes.world import PATIENCE, World
from trainer.recipe import Recipe
from trainer.saving.files import csv_text, portable
from trainer.telemetry.progress import Progress

SKIPPED_FILE = "skipped.csv"  # of a run folder: the damaged photos
HEADER = ("file", "split", "reason")
TOGETHER, WAITING = 256, 16  # photos of a piece of work, and threads, which mostly wait for the disk
JPEG, PNG, WEBP = (b"\xff\xd8", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"), (b"RIFF", b"WEBP")

Damaged = tuple[str, str, str]  # train or val, path, reason
Fault = tuple[int, str]  # an image's number, reason


def without_damage(data: Datasets, recipe: Recipe, world: World) -> Datasets:
    """The same set, with what was found to be damaged in `damaged` and in a note, the same on every rank. Collective.
    Raises SetupError.
    """
    mine = world.all_or_none(lambda: _look(data, recipe, world), PATIENCE)
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
    full = recipe.data.check == "full"
    threads = max(1, cores() // world.place.local_size) if full else WAITING
    total = sum(len(share) for *_, share in shares)
    progress = Progress(total, recipe.logging.progress and world.is_main, "check", "photo")
    pool = ThreadPoolExecutor(threads)
    try:
        with without_warnings():
            asked = {
                pool.submit(_unreadable, part, share, data): (split, part, len(share))
                for split, part, share in shares * (not full)
            }
            for done in as_completed(asked):
                split, part, count = asked[done]
                damaged += [(split, part.where(index), why) for index, why in done.result()]
                progress.more(count)
            for split, part, share in shares * full:
                damaged += [(split, part.where(index), why) for index, why in _undecodable(part, share, data, pool)]
                progress.more(len(share))
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()
    return damaged


def _unreadable(part: EncodedPhotos, share: Sequence[int], data: Datasets) -> list[Fault]:
    """Those of a share that do not look whole and cannot be read, and why."""
    suspects = (index for index in share if not looks_whole(part.address(index)))
    return [(index, why) for index in suspects if (why := _fault(part, data, index))]


def _undecodable(part: EncodedPhotos, share: Sequence[int], data: Datasets, pool: ThreadPoolExecutor) -> list[Fault]:
    """Those of a share that cannot be decoded without a complaint, and why. No other thread decodes meanwhile."""
    with libjpeg.heard() as complaint:
        look = partial(_fault, part, data, whole=True)
        faults = [*pool.map(look, share)]
        if complaint():  # of some of them: one after the other tells which
            faults = [fault or said for fault, said in ((look(index), complaint()) for index in share)]
    return [(index, why) for index, why in zip(share, faults, strict=True) if why]


def _fault(part: EncodedPhotos, data: Datasets, index: int, whole: bool = False) -> str:
    """Why an image cannot be decoded, as for evaluation or `whole`; empty where it can."""
    try:
        picture, _ = part.open(index, data.channels)
        if not (whole and libjpeg.decode_whole(encoded(part.address(index)))):
            held_out(picture, data.image_size)
    except Exception as error:  # decoders raise anything at all
        return reason(error)
    return ""


def looks_whole(address: bytes) -> bool:
    """Whether an image begins and ends as its kind does, or can at least be opened. Of a row of Parquet, which is
    read by whole groups only, nobody looks."""
    try:
        read = ends(address)
        if read is None:
            return True
        first, last, size = read
        if first.startswith(JPEG[0]):
            return JPEG[1] in last  # within a JPEG's pixels it cannot be
        if first.startswith(PNG[0]):
            return last.endswith(PNG[1])
        if first.startswith(WEBP[0]) and first[8:12] == WEBP[1]:
            return int.from_bytes(first[4:8], "little") + 8 <= size
        with header_file(address) as file, Image.open(file, formats=formats()):
            return True
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False

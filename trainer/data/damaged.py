"""Search for damaged photos before the first step, so that a run does not fail minutes later.

A JPEG file is complete if it has an end marker, a WebP file if its chunks have the declared length,
and a PNG file if it has an end chunk and the checksums of its pixels match. A file of another
format is complete if it can be decoded. The ranks divide the photos among themselves, and each rank
uses several threads to hide the latency of the disk. A file that seems incomplete is decoded as for
evaluation, so that a readable photo is not reported as damaged.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import chain
from typing import BinaryIO

import numpy as np
from PIL import Image

from trainer.data.encoded import EncodedPhotos
from trainer.data.folders.photo_folders import unreadable
from trainer.data.photos.decoding import (
    END,
    JPEG,
    PNG,
    check_png,
    describe_failure,
    list_formats,
    without_warnings,
)
from trainer.data.photos.photo_reader import prepare_for_evaluation
from trainer.data.sets import Datasets, ImageSet
from trainer.distributed.world import World
from trainer.processes.resources import count_cores
from trainer.recipe import Recipe
from trainer.saving import files
from trainer.saving.files import escape_non_utf8, format_csv
from trainer.telemetry.tracking import Progress

# File of a run folder that lists the damaged photos.
SKIPPED_FILE = "skipped.csv"
HEADER = ("file", "split", "reason")
# Number of photos that a thread checks per task.
TOGETHER = 256
# Number of threads that check photos. More threads than cores help, because the threads mostly wait
# for the disk.
WAITING = 16
# Semaphore that limits the number of threads that decode at the same time. More threads than cores
# would not be faster, and each thread needs memory for a decoded image.
DECODING = threading.BoundedSemaphore(count_cores())
# Number of bytes that are read at each end of a file to find markers. Some programs append a few
# bytes to a JPEG, so its end marker need not be at the very end.
ENDS = 4096
# Last bytes of a PNG file.
PNG_END = b"IEND\xaeB`\x82"

# (split, path, reason) of a damaged photo. The split is "train" or "val".
Damaged = tuple[str, str, str]


def find_damaged(
    data: Datasets,
    recipe: Recipe,
    world: World,
) -> Datasets:
    """Search a data set for damaged photos. All ranks must call this function together.

    Returns:
        The same result on all ranks: `data` if no photo is damaged, otherwise a copy whose field
        `damaged` lists the damaged photos and whose field `notes` mentions them.

    Raises:
        SetupError: photos are damaged, and data.on_error=stop.
    """
    found_here = world.all_or_none(lambda: _search_share(data, recipe, world))
    everywhere = sorted(chain.from_iterable(world.gather(found_here)))
    damaged = tuple(world.broadcast_object(everywhere))
    if not damaged:
        return data
    if recipe.data.on_error == "stop":
        failures = [(path, why) for _, path, why in damaged]
        raise unreadable(failures, len(data.train) + len(data.val))
    val_count = sum(split == "val" for split, _, _ in damaged)
    train_count = len(damaged) - val_count
    counts = []
    if train_count:
        counts.append(f"{train_count:,} training")
    if val_count:
        counts.append(f"{val_count:,} held-out")
    note = f"{' and '.join(counts)} photos are damaged: see {SKIPPED_FILE}"
    return replace(data, damaged=damaged, notes={**data.notes, "skipped": note})


def format_damaged(damaged: Sequence[Damaged]) -> str:
    """Return the text of skipped.csv."""
    rows = [(escape_non_utf8(path), split, why) for split, path, why in damaged]
    return format_csv([HEADER, *rows])


def _search_share(
    data: Datasets,
    recipe: Recipe,
    world: World,
) -> list[Damaged]:
    """Return the damaged photos among this rank's part of all photos.

    A data set in memory has already been decoded by every rank, so only rank 0 returns its
    failures.
    """
    damaged = []
    blocks = []
    for split, part in (("train", data.train), ("val", data.val)):
        if isinstance(part, ImageSet) and world.is_main:
            damaged += [(split, path, why) for path, why in part.failures]
        elif isinstance(part, EncodedPhotos) and recipe.data.check != "off":
            shares = np.array_split(np.arange(len(part)), world.size)
            share = shares[world.rank].tolist()
            for start in range(0, len(share), TOGETHER):
                blocks.append((split, part, share[start : start + TOGETHER]))
    progress = Progress(
        sum(len(indices) for _, _, indices in blocks),
        recipe.logging.progress and world.is_main,
        "check",
        "photo",
    )
    pool = ThreadPoolExecutor(WAITING)
    try:
        with without_warnings():
            lengths = {}
            for split, part, indices in blocks:
                task = pool.submit(_find_damaged, split, part, indices, data)
                lengths[task] = len(indices)
            for task in as_completed(lengths):
                damaged += task.result()
                progress.advance(lengths[task])
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()
    return damaged


def _find_damaged(
    split: str,
    part: EncodedPhotos,
    indices: Sequence[int],
    data: Datasets,
) -> list[Damaged]:
    """Return the photos that seem incomplete and cannot be decoded, with the reasons."""
    damaged = []
    for index in indices:
        if is_complete(part.address(index)):
            continue
        try:
            with DECODING:
                prepare_for_evaluation(part.open(index, data.channels)[0], data.image_size)
        except Exception as error:
            # Decoders can raise anything.
            damaged.append((split, part.where(index), describe_failure(error)))
    return damaged


def is_complete(address: bytes) -> bool:
    """Return whether an image file is complete, as the docstring of this module defines it.

    Images in shards are not checked, and count as complete.
    """
    if b"\0" in address:
        return True
    try:
        with files.open_regular(address) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ENDS))
            last = file.read(ENDS)
            file.seek(0)
            first = file.read(ENDS)
            if first.startswith(JPEG):
                # Compressed pixels cannot contain the end marker. If the marker is near the end of
                # the file, the pixels are therefore probably complete.
                return END in last
            file.seek(0)
            if first.startswith(PNG):
                check_png(np.fromfile(file, np.uint8))
                return last.endswith(PNG_END)
            if first.startswith(b"RIFF") and first[8:12] == b"WEBP":
                declared_size = int.from_bytes(first[4:8], "little") + 8
                return _find_chunks_end(file) == declared_size <= size
            with DECODING, Image.open(file, formats=list_formats()) as image:
                image.load()
                return True
    except Exception:
        # Decoders can raise anything.
        return False


def _find_chunks_end(file: BinaryIO) -> int:
    """Return the offset at which the last chunk of a WebP file ends."""
    end = 12
    file.seek(end)
    while len(head := file.read(8)) == 8:
        length = int.from_bytes(head[4:], "little")
        # A chunk of odd length is followed by a padding byte.
        end += 8 + length + length % 2
        file.seek(end)
    return end

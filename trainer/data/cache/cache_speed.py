"""Measures how long one process takes to read, decode and transform a photo, and to read it from the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainer.data.cache.packing import Format
from trainer.data.cache.stored import CachedFolder, picture_of, prepared
from trainer.data.encoded import EncodedPhotos, encoded
from trainer.data.photos.decoding import open_encoded
from trainer.data.photos.photo_reader import PhotoDraws, private_draws, shorter_side
from trainer.data.sampling import Array
from trainer.recipe import Recipe
from trainer.telemetry.verdict import Reading

PHOTOS, SECONDS = 32, 1.0  # that are measured, and seconds after which fewer do


def measure_reading(
    folder: EncodedPhotos, recipe: Recipe, size: int, channels: int, seconds: float = SECONDS
) -> Reading | None:
    """Of some photos, in this process as in a loader worker; None where none of them can be read.

    A photo that was read before may come from the page cache, as it does in training.

    Args:
        size, channels: of the images that the model gets.
        seconds: to spend, about.
    """
    index = np.random.default_rng(0).permutation(len(folder))[:PHOTOS]
    with _one_thread(), private_draws():
        draws = PhotoDraws(recipe.augment, recipe.seed, 0, index)
        rows = [_of(folder, place, row, draws, recipe, size, channels) for row, place in _within(index, seconds)]
    known = [row for row in rows[1 if len(rows) > 1 else 0 :] if row is not None]  # the first one warms up
    return Reading(*(sum(part) / len(known) for part in zip(*known, strict=True))) if known else None


def _within(index: Array, seconds: float) -> Iterator[tuple[int, int]]:
    ends = time.perf_counter() + seconds
    for row, place in enumerate(index.tolist()):
        if row > 1 and time.perf_counter() > ends:
            return
        yield row, place


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a loader worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _of(
    folder: EncodedPhotos, place: int, row: int, draws: PhotoDraws, recipe: Recipe, size: int, channels: int
) -> tuple[float, float, float, float] | None:
    """Seconds of reading, decoding and transforming a photo, and of all of it from the cache."""
    spent: list[float] = []

    def timed(decode: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        def decoded(factor: int) -> Tensor:
            began = time.perf_counter()
            image = decode(factor)
            spent.append(time.perf_counter() - began)
            return image

        return decoded

    with suppress(Exception):  # decoders raise anything at all; training reports it
        began = time.perf_counter()
        if isinstance(folder, CachedFolder):
            picture = folder.open(place, channels)[0]
            read, opened = time.perf_counter() - began, 0.0
        else:
            data = encoded(folder.address(place))
            read = time.perf_counter() - began
            picture = open_encoded(data, channels, folder.pixel_range)
            opened = time.perf_counter() - began - read  # includes decoding, but of JPEGs
        began = time.perf_counter()
        draws.apply(row, replace(picture, decode=timed(picture.decode)), size)
        whole = time.perf_counter() - began
        kept = recipe.data.cache_size or shorter_side(size)
        how = Format(recipe.data.cache_format or "raw", kept, channels, folder.pixel_range)
        stored = prepared(folder.address(place), how)
        began = time.perf_counter()
        xxhash.xxh3_64_intdigest(stored.data.copy().data)  # as reading from the cache does
        draws.apply(row, picture_of(stored, how), size)
        return read, opened + spent[0], whole - spent[0], time.perf_counter() - began
    return None

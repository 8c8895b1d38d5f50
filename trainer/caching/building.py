"""Making the blocks that are missing: by all cores, all ranks of a machine and all jobs that want the same ones.

Nobody leads. A block is made by whoever claims it first, under a name that no reader looks for, and gets its own name
when it is whole and on the disk; who dies lets go of its claim. So a build that was killed goes on where it was.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.caching import blocks
from trainer.caching.blocks import Prepared
from trainer.caching.packing import Format, Packing
from trainer.caching.stored import block_path, prepared
from trainer.errors import FULL, DiskFullError, PeerError, SetupError
from trainer.processes import fork_server
from trainer.saving import locks
from trainer.telemetry.tracking import bar_kind

LOOKED_AT, SECONDS = 24, 2.0  # photos that are prepared to estimate size and time, and when to be content with fewer
SPARE = 2**28  # bytes that are left free on the disk
POLL, SPEAK = 0.5, 10.0  # seconds between two looks at what others make, and between two lines


@dataclass(frozen=True)
class Estimate:
    """What making blocks takes.

    Attributes:
        photos, bytes: to be prepared, and what they come to.
        seconds: for one process.
    """

    photos: int
    bytes: int
    seconds: float


def missing(packing: Packing, home: Path) -> list[int]:
    """The blocks that are not there."""
    with os.scandir(home) as entries:
        there = {entry.name for entry in entries}
    names = [os.path.basename(block_path("", key.tobytes())) for key in packing.keys]
    return [block for block, name in enumerate(names) if name not in there]


def estimate(paths: Sequence[bytes], how: Format) -> Estimate:
    """From some of the photos, prepared."""
    begun, sizes = time.perf_counter(), []
    for path in random.Random(0).sample(paths, min(LOOKED_AT, len(paths))):
        with suppress(Exception):  # decoders raise anything at all; what cannot be read takes no room
            sizes.append(prepared(path, how).data.nbytes)
        if time.perf_counter() - begun > SECONDS and sizes:
            break
    one = (time.perf_counter() - begun) / max(1, len(sizes))
    return Estimate(len(paths), int(len(paths) * sum(sizes) / max(1, len(sizes))), len(paths) * one)


def build(packing: Packing, how: Format, home: Path, workers: int, show: bool, patience: float) -> None:
    """Make what is missing, with `workers` processes; returns when all of it is there, whoever made it.

    Args:
        show: draw a bar, or write lines, of how far it is.
        patience: seconds without a new block, of anybody, after which it is given up.

    Raises:
        DiskFullError, SetupError: `home` cannot be written.
        PeerError: another process claims a block and does not finish it, or one of ours was killed.
    """
    absent = missing(packing, home)
    if not absent:
        return
    progress, moved = BuildProgress(len(absent), show), time.monotonic()
    context = fork_server.context("torchvision", "trainer.caching.building")
    pool = ProcessPoolExecutor(workers, context, fork_server.begin_worker)
    try:
        while absent:
            random.shuffle(absent)  # ranks and jobs that begin together claim different ones
            made = [pool.submit(make, str(home), packing.keys[n].tobytes(), packing.paths[n], how) for n in absent]
            for done in as_completed(made):
                if done.result():
                    progress.one_more()
            before, absent = len(absent), missing(packing, home)
            if len(absent) < before:
                moved = time.monotonic()
            elif time.monotonic() - moved > patience:
                raise PeerError(
                    f"{home}: another process began {len(absent)} blocks of the cache {patience:g} seconds "
                    "ago and finished none: end it, or set data.cache=off"
                )
            else:
                time.sleep(POLL)
            progress.left(len(absent))
    except BrokenProcessPool:
        raise PeerError(
            "a process that built the cache died (killed, or out of memory): type the same again, it goes on; "
            "data.workers=1 takes less memory. Where its error is above, it imports the script that trains, which "
            'needs if __name__ == "__main__": around train(...)'
        ) from None
    except OSError as error:
        raise _refused(home, error) from error
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def make(home: str, key: bytes, paths: Sequence[bytes], how: Format) -> bool:
    """Make one block, if nobody else is at it. Returns whether it was made here."""
    torch.set_num_threads(1)
    path = Path(block_path(home, key))
    draft = path.with_suffix(blocks.DRAFT)
    with locks.claimed(draft) as file:
        if file is None:
            return False
        try:
            if not path.exists():
                blocks.write(file, key, (_or_none(name, how) for name in paths), len(paths))
                os.replace(draft, path)
                return True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)  # still claimed: nobody else writes to it
    return False


def _or_none(path: bytes, how: Format) -> Prepared | None:
    try:
        return prepared(path, how)
    except Exception:  # decoders raise anything at all; training says what is wrong with it
        return None


def require_room(home: Path, needed: Estimate, how: Format) -> None:
    """Refuse to begin what does not fit.

    Raises:
        DiskFullError: the line says what to type instead.
    """
    free = shutil.disk_usage(home).free
    if needed.bytes + SPARE > free:
        smaller = "data.cache_format=jpeg takes a tenth, " if how.layout == "raw" else ""
        raise DiskFullError(
            f"the cache of {needed.photos:,} photos takes about {size_of(needed.bytes)}, and {home} has "
            f"{size_of(free)} free: {smaller}data.cache_dir=FOLDER on another disk, or data.cache=off"
        )


def size_of(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _refused(home: Path, error: OSError) -> SetupError | DiskFullError:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return DiskFullError(
            f"{home}: the disk is full ({reason}); what is built stays: free some space and type the same again, "
            "or take data.cache_format=jpeg, data.cache_dir=FOLDER or data.cache=off"
        )
    return SetupError(f"{home} cannot be written ({reason}); data.cache_dir=FOLDER chooses another folder")


class BuildProgress:
    """How far a build is, for people."""

    def __init__(self, total: int, show: bool) -> None:
        bar = bar_kind() if show else None
        self._bar = bar(total=total, unit="block", desc="cache", leave=False) if bar else None
        self._show, self._total, self._done = show, total, 0
        self._begun = self._spoke = time.monotonic()

    def one_more(self) -> None:
        self.left(self._total - self._done - 1)

    def left(self, count: int) -> None:
        """So many blocks are still to come."""
        new, self._done = self._total - count - self._done, self._total - count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(new)
        elif self._show and now - self._spoke > SPEAK and self._done:
            self._spoke = now
            seconds = (now - self._begun) * count / self._done
            print(f"  cache: {self._done:,} of {self._total:,} blocks, about {seconds:.0f} s left", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

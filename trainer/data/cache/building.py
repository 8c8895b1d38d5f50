"""Building the missing blocks of a cache, on all cores, by all ranks of a machine and all jobs that need them.

There is no leader. The process that locks a block's draft first writes it, and renames it once it is complete and on
the disk; the lock of a process that dies is released. A build that was killed continues with the missing blocks.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import Prepared
from trainer.data.cache.stored import Format, Packing, block_path, key_of, prepared
from trainer.data.photos.decoding import reason
from trainer.errors import DiskFullError, PeerError, SetupError, is_disk_full
from trainer.processes import fork_server
from trainer.processes.resources import PHOTOS, keep_freed_memory
from trainer.processes.silence import AwakeClock
from trainer.saving import locks
from trainer.telemetry.progress import Progress
from trainer.telemetry.readable import as_size

LOOKED_AT, SECONDS = 24, 2.0  # photos that are prepared to estimate size and time, and seconds after which fewer do
SPARE = 2**28  # bytes that stay free on the disk
PASSING = {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EAGAIN}
POLL = 0.5  # seconds between two checks of others' blocks


@dataclass(frozen=True)
class Estimate:
    """The cost of building blocks."""

    photos: int  # to be prepared
    bytes: int  # their size in the cache
    seconds: float  # to read and decode them in one process: workers also start, write and share a memory


def missing(packing: Packing, home: Path) -> list[int]:
    """The blocks that have to be built."""
    names = set(os.listdir(home))
    return [block for block, key in enumerate(packing.keys) if block_path("", key.tobytes()) not in names]


def estimate(paths: Sequence[bytes], how: Format) -> Estimate:
    """From the time and size of some photos."""
    start, sizes = time.perf_counter(), []
    for path in random.Random(0).sample(paths, min(LOOKED_AT, len(paths))):
        with suppress(Exception):  # decoders raise anything at all; what cannot be read takes no room
            sizes.append(prepared(path, how).data.nbytes)
        if time.perf_counter() - start > SECONDS and sizes:
            break
    seconds = (time.perf_counter() - start) / max(1, len(sizes))
    return Estimate(len(paths), int(len(paths) * sum(sizes) / max(1, len(sizes))), len(paths) * seconds)


def build(packing: Packing, how: Format, home: Path, workers: int, show: bool, patience: float, ranks: int = 1) -> None:
    """Build the missing blocks with `workers` processes; returns when none is missing, whoever built them.

    Args:
        show: a progress bar, or lines of progress, the first as soon as a block shows how long they take.
        patience: seconds without progress of any process, after which it raises.
        ranks: processes of this machine that build it with as many workers, this one among them.

    Raises:
        DiskFullError, SetupError: `home` cannot be written.
        PeerError: another process does not finish a block, or one of ours was killed.
    """
    absent = missing(packing, home)
    if not absent:
        return
    since_moved, written, built, took = AwakeClock(), _drafted(home), 0, 0.0
    sizes = [len(paths) for paths in packing.paths]
    progress = Progress(sum(sizes[n] for n in absent), show, "cache", "photo", first=0.0)
    exchanged: set[int] = set()  # blocks whose photos changed meanwhile: these are not cached
    context = fork_server.context("torchvision", "trainer.data.cache.building")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    try:
        while absent:
            random.shuffle(absent)  # so that ranks and jobs take different ones
            asked = {pool.submit(task, str(home), packing.keys[n].tobytes(), packing.paths[n], how): n for n in absent}
            for done in as_completed(asked):
                made, seconds = done.result()
                if made is Made.EXCHANGED:
                    exchanged.add(asked[done])
                if made is Made.BUILT:
                    built, took = built + sizes[asked[done]], took + seconds
                if built and progress.due():
                    lack = [n for n in missing(packing, home) if n not in exchanged]  # others build, too
                    each = took / built / max(1, min(workers * ranks, len(lack)))
                    progress.left(sum(sizes[n] for n in lack), each)
            before, absent = len(absent), [n for n in missing(packing, home) if n not in exchanged]
            drafts, written = written, _drafted(home)
            if len(absent) < before or written != drafts:
                since_moved = AwakeClock()
            elif since_moved.seconds() > patience:
                raise PeerError(
                    f"{home}: another process began {len(absent)} blocks of the cache {patience:g} seconds "
                    "ago and finished none: end it, or set data.cache=off"
                )
            else:
                time.sleep(POLL)
            progress.left(sum(sizes[n] for n in absent))
    except BrokenProcessPool:
        raise PeerError(
            "a process that built the cache died (killed, or out of memory): type the same again, it goes on; "
            "data.workers=1 takes less memory. Where its error is above, it imports the script that trains, which "
            'needs if __name__ == "__main__": around train(...)'
        ) from None
    except UnreadableError as error:
        raise SetupError(str(error)) from None
    except OSError as error:
        raise _refused(home, error) from error
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


class Made(Enum):
    """Result of making a block: it was built; another process built or builds it; its photos have changed."""

    BUILT, ELSEWHERE, EXCHANGED = range(3)


def task(home: str, key: bytes, paths: Sequence[bytes], how: Format) -> tuple[Made, float]:
    """`make`, and the seconds that it took."""
    start = time.perf_counter()
    return make(home, key, paths, how), time.perf_counter() - start


def make(home: str, key: bytes, paths: Sequence[bytes], how: Format) -> Made:
    """Build one block, unless another process does. Raises OSError, UnreadableError."""
    torch.set_num_threads(1)
    path = Path(block_path(home, key))
    draft = path.with_suffix(cache_blocks.DRAFT)
    with locks.claimed(draft) as file:
        if file is None:
            return Made.ELSEWHERE
        try:
            if not path.exists():
                cache_blocks.write(file, key, (_or_none(name, how) for name in paths), len(paths))
                if key_of(paths, how) != key:
                    return Made.EXCHANGED
                os.replace(draft, path)
                return Made.BUILT
        except FileNotFoundError:  # another machine was faster, on a disk whose locks it does not see
            if not path.exists():
                raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)  # still locked: nobody else writes to it
    return Made.ELSEWHERE


def _begin() -> None:
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)


class UnreadableError(Exception):
    """A photo that cannot be read at the moment."""


def _or_none(path: bytes, how: Format) -> Prepared | None:
    """A photo to be stored; None where it cannot be decoded, which training reports."""
    try:
        return prepared(path, how)
    except Exception as error:  # decoders raise anything at all
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING):
            where = os.fsdecode(path.partition(b"\0")[0])
            raise UnreadableError(f"{where} cannot be read ({reason(error)}); type the same again") from None
        return None


def _drafted(home: Path) -> int:
    """Bytes of the blocks that are being written."""
    size = 0
    for draft in home.glob(f"*{cache_blocks.DRAFT}"):
        with suppress(FileNotFoundError):
            size += draft.stat().st_size
    return size


def require_room(home: Path, needed: Estimate, how: Format) -> None:
    """Raises DiskFullError."""
    free = shutil.disk_usage(home).free
    if needed.bytes + SPARE > free:
        smaller = "data.cache_format=jpeg takes a tenth, " if how.layout == "raw" else ""
        raise DiskFullError(
            f"the cache of {needed.photos:,} photos takes about {as_size(needed.bytes)}, and {home} has "
            f"{as_size(free)} free: {smaller}data.cache_dir=FOLDER on another disk, or data.cache=off"
        )


def _refused(home: Path, error: OSError) -> SetupError | DiskFullError:
    reason = error.strerror or str(error)
    if is_disk_full(error):
        return DiskFullError(
            f"{home}: the disk is full ({reason}); what is built stays: free some space and type the same again, "
            "or take data.cache_format=jpeg, data.cache_dir=FOLDER or data.cache=off"
        )
    return SetupError(f"{home} cannot be written ({reason}); data.cache_dir=FOLDER chooses another folder")

"""Building the missing blocks of a cache, on all cores, by all ranks of a machine and all jobs that need them.

There is no leader. The process that locks a block's draft first writes it, and renames it once it is complete and on
the disk; the lock of a process that dies is released. A build that was killed continues with the missing blocks.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import torch

from trainer.data.cache import cache_blocks
from trainer.data.cache.cache_blocks import Prepared
from trainer.data.cache.stored import Format, Packing, block_path, key_of, prepared
from trainer.errors import DiskFullError, PeerError, SetupError, is_disk_full
from trainer.processes import fork_server
from trainer.processes.resources import PHOTOS, keep_freed_memory
from trainer.processes.silence import AwakeClock
from trainer.saving import locks
from trainer.telemetry.progress import Progress

LOOKED_AT, SECONDS = 24, 2.0  # photos that are prepared to estimate the size, and seconds after which fewer do
POLL = 0.5  # seconds between two checks of others' blocks


def missing(packing: Packing, home: Path) -> list[int]:
    """The blocks that have to be built."""
    names = set(os.listdir(home))
    return [block for block, key in enumerate(packing.keys) if block_path("", key.tobytes()) not in names]


def bytes_of(paths: Sequence[bytes], how: Format) -> int:
    """About how large photos are in the cache, by the size of some."""
    start, sizes = time.perf_counter(), []
    for path in random.Random(0).sample(paths, min(LOOKED_AT, len(paths))):
        with suppress(Exception):  # decoders raise anything at all; what cannot be read takes no room
            sizes.append(prepared(path, how).data.nbytes)
        if time.perf_counter() - start > SECONDS and sizes:
            break
    return int(len(paths) * sum(sizes) / max(1, len(sizes)))


def build(packing: Packing, how: Format, home: Path, workers: int, show: bool, patience: float) -> None:
    """Build the missing blocks with `workers` processes; returns when none is missing, whoever built them.

    `show` a progress bar, or lines. Raises PeerError: a process died, or none built a block for `patience` seconds;
    DiskFullError, SetupError: `home` cannot be written, or photos change meanwhile.
    """
    absent = missing(packing, home)
    since_moved, sizes = AwakeClock(), [len(paths) for paths in packing.paths]
    context = fork_server.context("torchvision", "trainer.data.cache.building")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
    progress = Progress(sum(sizes[n] for n in absent), show, "cache", "photo", first=0.0)
    try:
        while absent:
            random.shuffle(absent)  # so that ranks and jobs take different ones
            asked = [pool.submit(make, str(home), packing.keys[n].tobytes(), packing.paths[n], how) for n in absent]
            for done in as_completed(asked):
                done.result()
                if progress.due():
                    progress.left(sum(sizes[n] for n in missing(packing, home)))  # others build, too
            before, absent = len(absent), missing(packing, home)
            if len(absent) < before:
                since_moved = AwakeClock()
            elif since_moved.seconds() > patience:
                raise PeerError(
                    f"{home}: another process began {len(absent)} blocks of the cache {patience:g} seconds "
                    "ago and finished none: end it, or set data.cache=off"
                )
            else:
                time.sleep(POLL)
    except BrokenProcessPool:
        raise PeerError(
            "a process that built the cache died (killed, or out of memory): type the same again, it goes on; "
            "data.workers=1 takes less memory. Where its error is above, it imports the script that trains, which "
            'needs if __name__ == "__main__": around train(...)'
        ) from None
    except SetupError:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"{home}: the disk is full: what is built stays: free some space and type the same again, or take "
                "data.cache_format=jpeg, data.cache_dir=FOLDER or data.cache=off"
            ) from error
        why = error.strerror or error
        raise SetupError(f"{home} cannot be written ({why}); data.cache_dir=FOLDER chooses another folder") from error
    finally:
        pool.shutdown(cancel_futures=True)
        progress.close()


def make(home: str, key: bytes, paths: Sequence[bytes], how: Format) -> None:
    """Build one block, unless another process does. Raises OSError, SetupError."""
    torch.set_num_threads(1)
    path = Path(block_path(home, key))
    draft = path.with_suffix(cache_blocks.DRAFT)
    with locks.claimed(draft) as file:
        if file is None:
            return
        try:
            if not path.exists():
                cache_blocks.write(file, key, (_or_none(name, how) for name in paths), len(paths))
                if key_of(paths, how) != key:
                    where = os.fsdecode(os.path.dirname(paths[0].partition(b"\0")[0]))
                    raise SetupError(f"{where}: photos were changed while the cache was built: type the same again")
                os.replace(draft, path)
        except FileNotFoundError:  # another machine was faster, on a disk whose locks it does not see
            if not path.exists():
                raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)  # still locked: nobody else writes to it


def _begin() -> None:
    fork_server.begin_worker()
    keep_freed_memory(PHOTOS)


def _or_none(path: bytes, how: Format) -> Prepared | None:
    """A photo to be stored; None where it cannot be read or decoded: training reads the photo itself, and reports."""
    with suppress(Exception):  # decoders raise anything at all
        return prepared(path, how)
    return None

"""What the C library does with memory that is not used any more."""

from __future__ import annotations

import ctypes

PHOTOS = 2**25  # bytes: the largest that glibc can be told; a photo of 11 megapixels


def keep_freed_memory(largest: int | None = None) -> None:
    """Let glibc's malloc keep big blocks for the next ones; by default it gives them back to the kernel.

    Which then clears every page of the next one: on a CPU 6 to 14 % of a training step, and up to half of the time in
    which a photo is decoded. Blocks of more than `largest` bytes go back all the same; None: none do.
    """
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        if largest is None:
            libc.mallopt(m_mmap_max, 0)  # no block a mapping of its own, which would go back when freed
        else:
            libc.mallopt(m_mmap_threshold, largest)
    except (OSError, AttributeError):
        return  # another C library: nothing to tune

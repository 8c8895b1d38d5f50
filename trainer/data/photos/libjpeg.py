"""What libjpeg says of a damaged JPEG that it decodes all the same: torchcodec and torchvision let it write to
this process's stderr.

It writes only the first complaint of a picture. A few bytes between the last pixel and the end marker are no damage:
some cameras and editors leave them.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator

import torch

from trainer.data.photos.decoding import Bytes
from trainer.data.photos.jpeg import jpeg_pixels

WORDS = re.compile(rb"^(Corrupt JPEG data: |Premature end of JPEG)(\d extraneous bytes before marker 0xd9)?.*\n", re.M)


def decode_whole(data: Bytes) -> bool:
    """Decode all of a JPEG, so that libjpeg complains; whether it can be."""
    with contextlib.suppress(RuntimeError):
        return data[:2].tobytes() == b"\xff\xd8" and jpeg_pixels(torch.from_numpy(data), 1).numel() > 0
    return False


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], str]]:
    """Within this block stderr is heard, and written to afterwards. Gives what tells the first complaint since it was
    last asked; empty where there is none."""
    with tempfile.TemporaryFile() as file:
        place, stderr = 0, os.dup(2)
        os.dup2(file.fileno(), 2)

        def complaint() -> str:
            nonlocal place
            text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - place, place)
            place += len(text)
            return next((said[0].decode().strip() for said in WORDS.finditer(text) if not said[2]), "")

        try:
            yield complaint
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            os.write(2, WORDS.sub(b"", file.read()))

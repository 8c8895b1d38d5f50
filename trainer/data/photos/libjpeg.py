"""What libjpeg says of a damaged JPEG that it decodes all the same: torchvision lets it write to this process's stderr.

Only the first complaint of a picture is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

import torch

from trainer.data.photos.decoding import Bytes, jpeg_pixels

COMPLAINT = re.compile(r"^(?:Corrupt JPEG data: |Premature end of JPEG).*\n", re.M)
# Some cameras and editors leave a few bytes between the last pixel and the end marker.
HARMLESS = re.compile(r"Corrupt JPEG data: \d extraneous bytes before marker 0xd9")


class Listener:
    """Hears this process's stderr."""

    def __init__(self, file: int) -> None:
        self._file, self._heard = file, 0
        self.others = ""  # what is no complaint of libjpeg's

    def take(self) -> str:
        """The first complaint since it was last asked; empty where there is none."""
        text = os.pread(self._file, os.fstat(self._file).st_size - self._heard, self._heard)
        self._heard += len(text)
        words = text.decode(errors="replace")
        self.others += COMPLAINT.sub("", words)
        return next((said.strip() for said in COMPLAINT.findall(words) if not HARMLESS.match(said)), "")

    def check(self, data: Bytes) -> None:
        """Raises ValueError where libjpeg complains of an image's bytes, while nothing else is decoded."""
        decode_whole(data)
        if complaint := self.take():
            raise ValueError(complaint)


def decode_whole(data: Bytes) -> bool:
    """Decode all of a JPEG, so that libjpeg complains; whether torchvision can."""
    with contextlib.suppress(RuntimeError):
        return data[:2].tobytes() == b"\xff\xd8" and jpeg_pixels(torch.from_numpy(data), 1).numel() > 0
    return False


@contextlib.contextmanager
def heard() -> Iterator[Listener]:
    """Within this block, what is written to this process's stderr is heard first, and written there afterwards."""
    with tempfile.TemporaryFile() as file:
        listener = Listener(file.fileno())
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            stderr = os.open(os.devnull, os.O_WRONLY)
        os.dup2(file.fileno(), 2)
        try:
            yield listener
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            listener.take()
            if listener.others:
                print(listener.others, end="", file=sys.stderr, flush=True)

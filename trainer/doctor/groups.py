"""A process group of real processes, small and short: do they find each other, and do their sums come out right?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from types import TracebackType

from trainer.errors import SetupError

PATIENCE = 180.0  # seconds; loading torch from a slow disk or on a busy machine takes most of it


class Group:
    """`size` processes that sum a pattern, from the moment this block is entered; they end with it."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend, self.size = backend, size

    def __enter__(self) -> Group:
        self.begun = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="trainer-")
        command = [sys.executable, "-m", "trainer.doctor.rank", self.backend]
        store = os.path.join(self._folder.name, "store")
        pipe = subprocess.PIPE
        self.children = [
            subprocess.Popen([*command, str(rank), str(self.size), store], stdout=pipe, stderr=pipe, text=True)
            for rank in range(self.size)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.kill()
            child.communicate()
        self._folder.cleanup()

    def outcome(self) -> str:
        """That it works, with the seconds it took.

        Raises:
            SetupError: it does not, with the first process's reason.
        """
        reasons = []
        for rank, child in enumerate(self.children):
            try:
                said, _ = child.communicate(timeout=max(1.0, self.begun + PATIENCE - time.monotonic()))
            except subprocess.TimeoutExpired:
                reasons.append(f"process {rank} was silent for {PATIENCE:.0f} s")
                continue
            if child.returncode:
                reasons.append(said.strip() or f"process {rank} ended with exit code {child.returncode}")
        if reasons:
            own = [reason for reason in reasons if "lost another rank" not in reason]
            raise SetupError(f"{self.backend} does not work between {self.size} processes here: {(own or reasons)[0]}")
        return "sums come out right"

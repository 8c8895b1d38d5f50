"""Memory that a process keeps for its next big blocks, and memory that it frees."""

import sys

import pytest

from tests import warm
from tests.command_line import python

PROGRAM = """
import sys, torch
from trainer.processes.resources import keep_freed_memory
keep_freed_memory(*map(int, sys.argv[2:]))
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
first = resident()
torch.ones(int(sys.argv[1]), dtype=torch.uint8)
print(resident() - first)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    ("size", "largest", "kept"),
    [(2**24, [2**25], True), (2**27, [2**25], False), (2**27, [], True)],
)
def test_blocks_as_large_as_is_asked_for_are_kept(size, largest, kept):
    completed = python("-c", PROGRAM, size, *largest, start=warm.run, timeout=120)
    assert completed.returncode == 0, completed.stderr
    assert (int(completed.stdout) > size / 2) == kept, completed.stdout

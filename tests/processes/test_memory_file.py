"""Files in memory: maps see each other's writes, and no file remains."""

import os
from pathlib import Path

import pytest

from trainer.errors import SetupError
from trainer.processes.memory_file import MemoryFile, OtherProcessError


@pytest.fixture
def file():
    file = MemoryFile.create("trainer-test", 64, "refused")
    yield file
    file.close()


def test_an_address_leads_to_the_same_bytes(file):
    there = file.address().open()
    there[:4] = b"here"
    assert file.memory[:5] == b"here\0" and len(file.memory) == len(there) == 64


def test_an_address_of_another_container_or_of_nobody(file):
    address = file.address()
    with pytest.raises(OtherProcessError):
        address._replace(inode=address.inode + 1).open()
    file.close()
    with pytest.raises(FileNotFoundError):
        address.open()


def test_a_memory_file_grows_and_old_maps_stay_valid(file):
    other = MemoryFile(os.dup(file.descriptor))
    old = file.memory
    grown = file.reach(65)
    grown[0], grown[127] = 1, 2
    assert len(grown) == 128 and file.reach(10) is grown and old[0] == 1
    assert len(other.memory) == 64 and other.reach(128)[127] == 2
    other.close()


def test_private_memory_is_not_shared(file):
    own = file.private()
    own[0] = 7
    assert file.memory[0] == 0


def test_a_memory_file_has_no_name_and_is_freed():
    begun = set(os.listdir("/proc/self/fd"))
    file = MemoryFile.create("trainer-test", 64, "refused")
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "trainer-test" in line
    ]
    assert maps and all("/memfd:" in line and "/dev/shm" not in line for line in maps)
    file.close()
    del file
    assert set(os.listdir("/proc/self/fd")) == begun


def test_only_linux_has_it(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(SetupError, match=r"^refused$"):
        MemoryFile.create("trainer-test", 64, "refused")

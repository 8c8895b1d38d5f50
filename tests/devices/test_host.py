"""Resources of a container, in invented folders of control groups."""

from __future__ import annotations

import os
import re

import pytest
import torch

from trainer.commands import doctor
from trainer.commands.doctor import Findings
from trainer.data.workers import worker_counts
from trainer.devices import host
from trainer.memory.device import free_memory

GIB = 2**30
V2 = {
    "memory.max": 4 * GIB,
    "memory.current": 3 * GIB,
    "memory.stat": f"anon 1\ninactive_file {GIB}\n",
}
V1 = {
    "memory.limit_in_bytes": 4 * GIB,
    "memory.usage_in_bytes": 3 * GIB,
    "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
}
CONTAINERS = {
    "version 2, seen from inside": ("0::/\n", {"": V2}),
    "version 2, a group within the limited one": (
        "0::/pod/job\n",
        {"pod": V2, "pod/job": {**V2, "memory.max": "max"}},
    ),
    "version 2, the path of outside": ("0::/docker/123\n", {"": V2}),
    "version 1": (
        "4:cpu,memory:/job\n0::/\n",
        {"memory/job": V1, "memory": {**V1, "memory.limit_in_bytes": 2**63}},
    ),
    "no list of groups": (None, {"memory": V1}),
}


@pytest.fixture
def computer(tmp_path, monkeypatch):
    """Makes the folders of a container on a computer with 10 GiB free."""
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {10 * GIB // 1024} kB\nHuge: 0\n"
    )

    def made(own, groups):
        for folder, files in groups.items():
            (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "groups" / folder / name).write_text(f"{text}\n")
        if own is not None:
            (tmp_path / "proc" / "self" / "cgroup").write_text(own)

    return made


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_is_left_what_its_limit_leaves(computer, container):
    computer(*CONTAINERS[container])
    # Cached files are given up.
    assert host.free_memory() == free_memory(torch.device("cpu")) == 2 * GIB
    assert host.memory_limit() == 4 * GIB


@pytest.mark.parametrize("groups", [{}, {"": {"memory.max": "max", "memory.current": 1}}])
def test_an_unlimited_container_has_the_computers_resources(computer, groups):
    computer("0::/\n", groups)
    assert (host.free_memory(), host.memory_limit()) == (10 * GIB, None)


def test_work_that_exceeds_a_containers_memory_is_not_started(computer, monkeypatch):
    """Loader workers that fill more than it may have are killed."""
    large = os.statvfs_result((4096, 4096, *[100 * GIB // 4096] * 3, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: large)
    monkeypatch.setattr(worker_counts, "count_cores", lambda: 64)
    computer("0::/\n", {})
    # 19 batches of a quarter are within a half of 10 GiB.
    assert worker_counts.allowed(1, GIB // 4) == 9
    computer("0::/\n", {"": V2})
    assert worker_counts.allowed(1, GIB // 4) == 1


def test_doctor_shows_it(computer):
    computer("0::/\n", {"": V2})
    actual = Findings()
    doctor.report_resources(actual)
    assert re.search(
        r"^  memory +2\.0 of [\d.]+ GiB free, at most 4\.0 GiB here", actual.text(), re.M
    )

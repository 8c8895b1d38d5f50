"""Devices and threads as pure tables."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.command_line import QUIET, trainer
from trainer.distributed import world
from trainer.distributed.peers import explain_no_answer
from trainer.errors import SetupError
from trainer.processes import resources
from trainer.processes.rank import Place
from trainer.recipe import load


@pytest.mark.parametrize(
    ("words", "local", "environment", "expected"),
    [
        ([], 1, {}, 8),
        ([], 2, {}, 4),
        ([], 16, {}, 1),
        (["threads=3"], 2, {"OMP_NUM_THREADS": "5"}, 3),
        ([], 2, {"OMP_NUM_THREADS": "5"}, 5),
        ([], 2, {"OMP_NUM_THREADS": "1"}, 1),
        ([], 2, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 4),  # torchrun's own doing
        (
            [],
            2,
            {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "TRAINER_PARENT": "7"},
            1,
        ),  # the user's
    ],
)
def test_threads(words, local, environment, expected, monkeypatch):
    monkeypatch.setattr(resources, "count_cores", lambda: 8)
    recipe = load(None, *words)
    monkeypatch.setattr(os, "environ", environment)
    assert resources.choose_threads(recipe, local) == expected


def test_alone_every_exchange_is_the_identity():
    alone = world.World(Place(), torch.device("cpu"), 1, ("cpu",))
    alone.connect(1.0)
    assert alone.broadcast_object({"a": 1}) == {"a": 1}
    assert alone.gather(3) == [3]
    assert alone.name == "cpu"
    assert alone.sum_(torch.tensor([2.0])).item() == 2
    alone.barrier()
    alone.close()


def test_ranks_agree_on_their_devices_before_the_group_exists():
    """Nodes may differ: if two ranks share a card on one node, all ranks use gloo."""

    def agree(*found):
        store = dist.HashStore()
        size = len(found)
        worlds = [
            world.World(
                Place(rank, size, rank % 2, 2, 0, True),
                torch.device(name),
                1,
                (),
                (),
                shared,
            )
            for rank, (name, shared) in enumerate(found)
        ]
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda one: one.agree(store), worlds))
        for one in worlds:
            one.devices = tuple(other.name for other in worlds)
        return worlds

    unlike = agree(
        ("cuda:0", True),
        ("cuda:0", True),
        ("cuda:0", False),
        ("cuda:1", False),
    )
    assert [one.shared for one in unlike] == [True] * 4
    assert unlike[0].devices == ("cuda:0@0#0", "cuda:0@0#1", "cuda:0@1#2", "cuda:1@1#3")
    assert [one.sharing() for one in unlike] == [2, 2, 1, 1]
    assert unlike[0].count() == 3
    alike = agree(("cuda:0", False), ("cuda:1", False))
    assert [one.shared for one in alike] == [False] * 2
    assert alike[0].devices == ("cuda:0", "cuda:1")
    assert [one.sharing() for one in alike] == [1, 1]
    assert [one.sharing() for one in agree(("cpu", False), ("cpu", False))] == [2, 2]
    with pytest.raises(SetupError, match=r"rank 1 .*\bGPU\b.*rank 0 .*devices=\[cpu\]"):
        agree(("cpu", False), ("cuda:0", False))


def test_gloo_reports_a_lost_peer_before_nccl_aborts(monkeypatch):
    """Stand-ins create the groups, because NCCL needs cards."""
    patience = {}

    class Group:
        def __init__(self, timeout):
            patience["gloo"] = timeout

        def _get_backend(self, device):
            return SimpleNamespace(
                set_timeout=lambda timeout: patience.update({device.type: timeout})
            )

    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: Group(timeout))
    monkeypatch.setattr(world.silence, "set_limit", lambda seconds: timedelta(seconds=seconds))
    cards = world.World(Place(0, 2, 0, 2, 0, True), torch.device("cuda", 0), 1, (), nccl=True)
    cards.arrange({"replicas": 1, "stages": 2}, groups={"stages": 1})
    assert patience == {"gloo": timedelta(seconds=600), "cuda": timedelta(seconds=720)}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: Group(given["timeout"]))
    monkeypatch.setattr(dist, "all_gather_object", lambda names, name: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(None)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world, "check_sums", lambda *_: None)
    cards._join(dist.HashStore(), timedelta(seconds=5))
    assert patience == {"gloo": timedelta(seconds=5), "cuda": timedelta(seconds=125)}


SLEEPS = """
import time
import torch.distributed as dist
from trainer.distributed import world
world.FIRST_EXCHANGE = 8.0
dist.all_gather_object = lambda *given, **named: time.sleep(1000)
"""


@pytest.mark.slow
def test_an_unreachable_address_between_ranks_is_reported_and_ends(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    words = ["recipe=digits", "model.name=mlp", "devices=[cpu]", "nproc=2", "plugin=sleeps", *QUIET]
    completed = trainer(*words, f"output={tmp_path / 'run'}", cwd=tmp_path)
    assert completed.returncode == 3, completed.stderr
    message = completed.stderr.splitlines()
    assert len(message) == 2 and world.MET in message[0]
    assert re.search(r"\b8 s\b.*\bGLOO_SOCKET_IFNAME\b", message[1])


def test_cards_that_do_not_reach_each_other():
    line = str(explain_no_answer(True, 60))
    assert all(
        name in line for name in ("NCCL_P2P_DISABLE=1", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    )

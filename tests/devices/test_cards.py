"""First contact with cards that are not as they should be, on stubs: one line with what to type."""

from __future__ import annotations

import glob
import importlib

import pytest
import torch

from trainer import __main__ as cli
from trainer.devices import cards
from trainer.distributed import world
from trainer.errors import RecipeError, SetupError
from trainer.launch import launching
from trainer.processes import family, resources
from trainer.processes.rank import Place
from trainer.training import loop

CUDA = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine with `nodes` NVIDIA cards.

    CUDA sees `count` of them, or none for a `reason`.
    """

    def make(
        nodes,
        count=0,
        reason="",
        shown=None,
        cuda="13.0",
        hip=None,
        perhaps=(),
    ):
        names = [f"/dev/nvidia{index}" for index in range(nodes)]
        monkeypatch.setattr(cards, "list_device_nodes", lambda: (names, list(perhaps)))
        monkeypatch.setattr(cards, "_openable", lambda nodes: nodes)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: count, raising=False)

        def init():
            raise RuntimeError(reason)

        monkeypatch.setattr(torch.cuda, "init", init)
        if shown is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)

    return make


def typed(monkeypatch, capsys, *words):
    """Return what a user sees after typing this: exit code, stderr, and the recipes that reached
    training.
    """
    ran = []
    for name in ("RANK", "WORLD_SIZE", "NPROC", "NNODES", "SLURM_STEP_ID", family.PARENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(family, "die_with_parent", lambda: None)
    monkeypatch.setattr(loop, "run", lambda recipe, **_: ran.append(recipe))
    monkeypatch.setattr(
        launching, "start", lambda recipe, words, launch, restarts: ran.append(launch) or 0
    )
    code = cli.answer(words)
    return code, capsys.readouterr().err, ran


@pytest.mark.parametrize(
    "reason", ["No CUDA GPUs are available", "the driver is too old (found version 12020)"]
)
def test_cards_that_cuda_cannot_use_stop_with_what_to_type(machine, monkeypatch, capsys, reason):
    machine(2, reason=reason)
    for words in (["mode=single"], [], ["devices=[cuda:0]", "mode=single"]):
        code, line, ran = typed(monkeypatch, capsys, "recipe=digits", *words)
        assert (code, ran, line.count("\n")) == (3, [], 1)
        assert all(
            part in line for part in ("2 NVIDIA cards", "devices=[cpu]", "nvidia-smi", reason)
        )
    for words in (["recipe=digits", "devices=[cpu]"], ["recipe=digits_hogwild"]):
        assert typed(monkeypatch, capsys, *words)[:2] == (0, "")


def test_without_a_card_the_cpu_trains_silently(machine, monkeypatch, capsys):
    machine(0, reason="Found no NVIDIA driver")
    assert typed(monkeypatch, capsys, "recipe=digits", "mode=single")[:2] == (0, "")
    # A processor with AMD graphics.
    machine(0, reason="Found no NVIDIA driver", perhaps=["/dev/kfd"])
    assert typed(monkeypatch, capsys, "recipe=digits", "mode=single")[:2] == (0, "")
    for shown in ("", " ", "-1", "none", "NoDevFiles", "-1,0"):
        machine(2, reason="No CUDA GPUs are available", shown=shown)
        assert typed(monkeypatch, capsys, "recipe=digits", "mode=single")[:2] == (0, "")


def test_builds_for_other_machines(machine, monkeypatch, capsys):
    machine(1, cuda=None)
    code, line, _ = typed(monkeypatch, capsys, "recipe=digits", "mode=single")
    assert code == 3
    assert "without CUDA" in line
    assert cards.REINSTALL in line
    assert "devices=[cpu]" in line
    machine(0, reason="No HIP GPUs are available", cuda=None, hip="7.2", perhaps=["/dev/kfd"])
    code, line, _ = typed(monkeypatch, capsys, "recipe=digits", "mode=single")
    assert code == 3 and "HIP GPUs" in line


@pytest.mark.parametrize(
    ("shown", "count", "right"),
    [
        ("0,0", 0, "0"),
        ("all", 0, "0"),
        ("0,", 0, "0"),
        ("0,7,1", 1, "0"),
        ("GPU-8932f937,GPU-ffffffff", 1, "GPU-8932f937"),
    ],
)
def test_an_odd_CUDA_VISIBLE_DEVICES_is_usage(machine, monkeypatch, capsys, shown, count, right):
    machine(4, count, "No CUDA GPUs are available", shown)
    code, line, ran = typed(monkeypatch, capsys, "recipe=digits")
    assert (code, ran, line.count("\n")) == (2, [], 1)
    assert f"CUDA sees {count} of them: type CUDA_VISIBLE_DEVICES={right}, or" in line


@pytest.mark.parametrize(
    ("nodes", "count", "shown"),
    [
        (4, 4, None),
        (4, 2, "2, 3"),
        (4, 1, "0,-1,2"),
        (4, 1, "GPU-8932f937-d72c"),
        (2, 1, "MIG-GPU-8932/1/0"),
    ],
)
def test_cards_as_they_should_be(machine, nodes, count, shown):
    machine(nodes, count, shown=shown)
    assert cards.detect() == cards.Cards(count) and resources.count_cuda_devices() == count


def test_one_of_several_cards_failed(machine, monkeypatch, capsys):
    machine(4, 3)
    code, line, _ = typed(monkeypatch, capsys, "recipe=digits")
    assert code == 3 and "has 4 NVIDIA cards" in line and "devices=[cuda:0,cuda:1,cuda:2]" in line
    code, line, ran = typed(
        monkeypatch, capsys, "recipe=digits", "devices=[cuda:0,cuda:1,cuda:2]", "batch_size=96"
    )
    assert (code, line) == (0, "") and ran[0].nproc == 3
    monkeypatch.setattr(cards, "_openable", lambda nodes: nodes[:3])  # the fourth is another job's
    assert resources.count_cuda_devices() == 3
    machine(4, 1)
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern] if pattern == cards.MIG else [])
    assert resources.count_cuda_devices() == 1  # divided cards: a process sees one part


@pytest.fixture
def joined(monkeypatch):
    """Let two ranks meet: this one is rank 0, and the other has stored its devices."""
    store = torch.distributed.HashStore()
    store.set("device/1", "cuda:1")
    # There is a function of this name, too.
    meeting = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(
        meeting,
        "rendezvous",
        lambda *_, **__: iter([(store, 0, 2)]),
    )
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    return store


def test_ranks_on_cards_need_nccl(joined, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    rank = world.World(
        Place(0, 2, 0, 2, 0, True),
        CUDA[0],
        1,
        (),
    )
    with pytest.raises(SetupError, match="no NCCL"):
        rank.connect(1.0)


def test_ranks_on_cards_sum_a_pattern_first(joined, monkeypatch):
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        dist,
        "all_gather_object",
        lambda names, mine: names.__setitem__(slice(None), [mine, "other"]),
    )
    monkeypatch.setattr(dist, "all_reduce", lambda numbers: None)  # the other rank's part is lost
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world.World, "_delay_nccl", lambda *_: None)  # there is no group of NCCL's
    rank = world.World(
        Place(0, 2, 0, 2, 0, True),
        CUDA[0],
        1,
        (),
    )
    with pytest.raises(SetupError, match=r"sum .*NCCL_P2P_DISABLE=1"):
        rank.connect(1.0)
    alone = world.World(
        Place(0, 2, 0, 2, 0, True),
        torch.device("cpu"),
        1,
        (),
    )
    joined.set("device/1", "cpu")
    alone.connect(1.0)  # gloo's sums need no test


def test_a_pool_reports_problems_of_the_cards(machine):
    from trainer.pool.device_pool import check_devices

    machine(1, reason="The NVIDIA driver on your system is too old")
    with pytest.raises(SetupError, match="too old"):
        check_devices(["cuda:0"])
    machine(0)
    with pytest.raises(RecipeError, match=r"cuda:0\b.*devices=\[cpu\]"):
        check_devices(["cuda:0"])


def test_nodes_that_may_not_be_opened_are_not_ours(tmp_path):
    own = tmp_path / "nvidia0"
    failed = tmp_path / "nvidia1"
    own.touch()
    # A process that fails has not ended yet.
    assert cards._openable([str(own), str(failed)]) == [
        str(own),
        str(failed),
    ]

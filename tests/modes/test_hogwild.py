"""Hogwild: shared memory without a name, what passes through it, and whole runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from tests.command_line import (
    QUIET,
    alive,
    blocks,
    environment,
    ok,
    orphaned_blocks,
    result,
    steps,
    trainer,
)
from tests.strategies import create_strategy, gathered, on_ranks
from trainer.errors import SetupError
from trainer.modes.hogwild import create_memory, map_memory
from trainer.processes.family import RANK_NAME
from trainer.processes.memory_file import ALIGNMENT
from trainer.recipe import load
from trainer.saving.journal import JOURNAL, read_journal

# --- the memory
# --------------------------------------------------------------------------------------------------


def network():
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    model.register_buffer("empty", torch.zeros(0))
    return model


def test_all_ranks_have_the_same_memory():
    """Rank 0's values, shapes and strides; the same Parameter objects; one rank's update is every
    rank's.
    """
    begun = set(os.listdir("/proc/self/fd"))

    def work(world):
        model = network()
        for tensor in model.state_dict().values():
            tensor.fill_(world.rank + 1)
        before = list(model.parameters())
        strategy = create_strategy(
            load(None, "mode=hogwild"),
            world,
            (2, 3, 4, 4),
            classes=3,
        )
        strategy.setup(model)
        named = {**strategy.named_parameters(), **strategy.named_buffers()}
        assert all(tensor.unique().tolist() == [1] for tensor in named.values() if tensor.numel())
        assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in named.values())
        world.barrier()
        if world.rank == 1:
            model(torch.ones(2, 3, 4, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        world.barrier()
        copies = gathered(strategy, named)
        world.barrier()
        assert (model[0].weight.grad is None) == (world.rank == 0), "gradients are each rank's own"
        return {name: tensor.detach().clone() for name, tensor in named.items()}, copies

    one, two = on_ranks(2, work)
    torch.testing.assert_close(
        one,
        (two[0], one[1]),
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(one[1], one[0], rtol=0, atol=0)
    assert one[0]["3.bias"].tolist() == pytest.approx([0.8] * 3), "rank 0 sees what rank 1 did"
    assert one[0]["1.num_batches_tracked"].item() == 2
    assert one[0]["1.running_mean"][0] != 1
    assert set(os.listdir("/proc/self/fd")) <= begun, "the memory is gone with its tensors"


def test_where_memory_cannot_be_shared(monkeypatch):
    file = create_memory(64)
    address = file.address()
    map_memory(address)[:] = bytes(range(64))
    assert map_memory(address)[:] == file.memory[:] == bytes(range(64))
    with pytest.raises(SetupError, match="processes"):
        map_memory(address._replace(inode=address.inode + 1))
    file.close()
    with pytest.raises(SetupError, match=r"opened.*mode=local_sgd"):
        map_memory(address)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(SetupError, match=r"Linux.*mode=local_sgd"):
        create_memory(64)


# --- whole runs
# --------------------------------------------------------------------------------------------------


WATCHED = """
import contextlib
import os
from torch import nn
from trainer import register_model

class Watched(nn.Sequential):
    def forward(self, x):
        if x.device.type != "meta":  # a trial of the shape
            with open(f"rank{os.environ.get('RANK')}.txt", "a") as file:
                print("train" if self.training else "test", len(x), float(self[1].weight.sum()),
                    file=file)
        return super().forward(x)

@register_model("watched")
def build(num_classes, channels, image_size):
    return Watched(nn.Flatten(), nn.Linear(channels * image_size ** 2, num_classes))
"""


def test_a_whole_run(tmp_path):
    """One of the two workers trains each image once per epoch.

    Evaluated, saved and resumed states are the same.
    """
    (tmp_path / "watched.py").write_text(WATCHED)
    run = tmp_path / "run"
    words = [
        "recipe=digits_hogwild",
        "plugin=watched",
        "model.name=watched",
        "nproc=2",
        "ema=0.9",
        "epochs=4",
        *QUIET,
    ]
    words += [f"output={run}", "save.every_steps=10"]
    killed = trainer(*words, cwd=tmp_path, env={"TRAINER_FAULT": "kill@1:27"})
    assert killed.returncode == 7 and "Traceback" not in killed.stderr, killed.stderr
    completed = ok(*words, "resume=auto", cwd=tmp_path)
    attempts, _ = read_journal(run / JOURNAL)
    assert attempts[-1].resumed == 20
    assert "worker update" in completed.stdout

    seen = [
        [line.split() for line in (tmp_path / f"rank{rank}.txt").read_text().splitlines()]
        for rank in (0, 1)
    ]
    tested = [[line for line in lines if line[0] == "test"] for lines in seen]
    assert tested[0] == tested[1] and len({line[2] for line in tested[0]}) > 1, (
        "all evaluate the same weights"
    )
    last = [[int(size) for kind, size, _ in lines if kind == "train"][-30:] for lines in seen]
    assert sum(last[0]) == 2 * 718 and sum(last[1]) == 2 * 719, (
        "epochs 3 and 4: all 1,437 images, each once"
    )

    run_result = result(run)
    assert run_result["steps"] == 60
    assert [int(row["step"]) for row in steps(run)] == list(range(1, 61))
    assert run_result["data"]["val_samples"] == 360
    assert run_result["losses"][-1] < 0.7 * run_result["losses"][0]
    evaluated = ok("evaluate", f"checkpoint={run}", "plugin=watched", cwd=tmp_path)
    assert f"val loss {run_result['val_loss']:.4f}" in evaluated.stdout
    assert f"{run_result['val_top1']:.2%}" in evaluated.stdout


@pytest.mark.slow
def test_a_killed_run_leaves_no_shared_memory(tmp_path):
    """Ranks have no file in /dev/shm while they train, open or mapped, so no file remains after any
    exit.
    """
    run = tmp_path / "run"
    words = ["recipe=digits_hogwild", "nproc=2", "epochs=5000", *QUIET, f"output={run}"]
    before = blocks()
    process = warm.Popen(
        [sys.executable, "-m", "trainer", *words], env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        wait_for(
            lambda: (
                process.poll() is not None
                or ((run / "steps.csv").exists() and len(steps(run)) > 30)
            )
        )
        assert process.poll() is None
        pids = [process.pid]
        for pid in pids:  # ranks are children of what the launcher forks them from
            pids += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().startswith(RANK_NAME)]
        assert len(ranks) == 2
        for pid in ranks:
            # torch's launcher has locks.
            maps = Path(f"/proc/{pid}/maps").read_text().replace("/dev/shm/sem.", "")
            assert "memfd:trainer-hogwild" in maps and "/dev/shm" not in maps
            assert not any("/dev/shm" in target for target in open_files(pid))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(map(alive, ranks)))
    assert not orphaned_blocks(before)


def open_files(pid):
    """The paths that the process has open. One may be closed while this reads."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Place, devices and threads as pure tables."""

import subprocess
import sys

import pytest

from trainer import world
from trainer.errors import PeerError, SetupError
from trainer.recipe import load

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_place():
    assert world.place({}) == world.Place()
    me = world.place(TORCHRUN)
    assert (me.rank, me.size, me.local_rank, me.local_size, me.restarts, me.launched) == (3, 4, 1, 2, 1, True)
    assert not me.is_main and world.place({}).is_main
    with pytest.raises(SetupError, match="RANK"):
        world.place({**TORCHRUN, "RANK": "x"})


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
        ([], 2, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "TRAINER_PARENT": "7"}, 1),  # the user's
    ],
)
def test_threads(words, local, environment, expected, monkeypatch):
    monkeypatch.setattr(world, "cores", lambda: 8)
    assert world.threads_per_process(load(None, *words), local, environment) == expected


def test_no_driver_no_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert world.cuda_count() == 0


def test_a_broken_collective_is_a_lost_peer():
    with pytest.raises(PeerError, match="lost another rank"), world.lost_peers():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError, match="shape") as other, world.lost_peers():
        raise RuntimeError("shape mismatch")
    assert not isinstance(other.value, PeerError)


def test_alone_every_exchange_is_the_identity():
    import torch

    alone = world.World(world.Place(), torch.device("cpu"), 1, ("cpu",))
    alone.connect(1.0)
    assert alone.share({"a": 1}) == {"a": 1} and alone.gather(3) == [3] and alone.name == "cpu"
    assert alone.sum_(torch.tensor([2.0])).item() == 2
    alone.barrier()
    alone.close()


def test_jobs_have_names_of_their_own():
    ours = world.job_id()
    done = subprocess.run(
        [sys.executable, "-c", "from trainer import world; print(world.job_id())"], capture_output=True, text=True
    )
    assert ours == world.job_id() != done.stdout.strip() != ""

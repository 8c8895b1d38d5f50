"""A torchrun of the user with machines that join and leave."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from tests.command_line import (
    QUIET,
    environment,
    free_port,
    losses,
    ok,
    result,
    steps,
    trainer,
    within,
)
from tests.warm import Popen
from trainer.processes.rank import LAUNCHER, find_elastic_problems, read_elastic_nodes


@pytest.mark.parametrize(
    ("typed", "variable", "nodes"),
    [
        (["--nnodes=1:4"], "", "1:4"),
        (["--nnodes", "2:3", "--nproc_per_node=1"], "", "2:3"),
        (["--nnodes=2"], "1:4", ""),  # The typed value wins.
        (["--nnodes=2:2"], "", ""),
        ([], "1:4", "1:4"),
        ([], "2", ""),
        ([], "", ""),
    ],
)
def test_a_rank_detects_an_elastic_launch(typed, variable, nodes, monkeypatch, tmp_path):
    with subprocess.Popen(
        ["sh", "-c", "read end", "torchrun", *typed], stdin=subprocess.PIPE
    ) as launcher:
        ours = {"RANK": "0", "WORLD_SIZE": "1", LAUNCHER: str(launcher.pid), "PET_NNODES": variable}
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        # The process has just started.
        within(60, Path(f"/proc/{launcher.pid}/cmdline").read_bytes)
        assert read_elastic_nodes() == nodes
        lacking = {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in lacking.items():
            monkeypatch.setenv(name, value)
        message = find_elastic_problems()
        assert (
            "--max-restarts=" in message and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in message
        ) == bool(nodes)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        assert find_elastic_problems() == ""
        if nodes == "1:4" and not variable:
            words = ["recipe=digits", "max_steps=1", f"output={tmp_path / 'run'}", *QUIET]
            completed = trainer(*words, env=ours)
            assert completed.returncode == 2
            assert "resume=auto" in completed.stderr
            assert len(completed.stderr.splitlines()) == 1
            assert not any(tmp_path.iterdir())
            assert message in " ".join(
                ok(*words, "resume=auto", env={**ours, **lacking}).stdout.split()
            )
        launcher.kill()


SLOW = """
import os, time
from torch import nn
from trainer import register_model

class Pause(nn.Module):
    def forward(self, x):
        if self.training and "RANK" in os.environ:
            time.sleep(0.3)
        return x

@register_model("slow")
def build(num_classes, channels, image_size):
    return nn.Sequential(
        Pause(), nn.Conv2d(channels, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * image_size ** 2, num_classes),
    )
"""


@pytest.mark.full("a minute and a half")
def test_four_ranks_become_three_and_four_again(tmp_path):
    """64 images are 16 on each of four ranks, and 22 + 21 + 21 on three.

    The machine that is lost has rank 0.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    words = [
        "recipe=digits",
        "plugin=slow",
        "model.name=slow",
        "batch_size=64",
        "epochs=3",
        "optimizer.lr=0.05",
    ]
    words += ["schedule.warmup_epochs=0", "ema=0.9", "save.every_steps=4", "timeout=60", *QUIET]
    single = tmp_path / "single"
    run = tmp_path / "run"
    port = int(free_port())
    ok(*words, "mode=single", f"output={single}", cwd=tmp_path)
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    conf = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:4",
        "--nproc_per_node=1",
        "--rdzv_id=t",
    ]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", f"--rdzv_conf={conf}"]
    command += ["--local_addr=127.0.0.1", "--max_restarts=100", "-m", "trainer", *words, "mode=ddp"]
    command += [f"output={run}", "resume=auto"]
    settings = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with ExitStack() as closing:
        agents = []
        logs = []

        def join():
            logs.append(tmp_path / f"agent{len(logs)}.txt")
            with logs[-1].open("w") as log:
                agents.append(
                    Popen(command, env=settings, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
                )
            closing.callback(agents[-1].wait)
            closing.callback(agents[-1].kill)

        def reached(step, told):
            text = "".join(log.read_text() for log in logs)
            return told in text and (run / "steps.csv").exists() and len(steps(run)) >= step

        for _ in range(4):
            join()
        assert within(240, lambda: reached(10, "4 x cpu"))
        lost = agents.pop(next(n for n, log in enumerate(logs) if "4 x cpu" in log.read_text()))
        lost.kill()
        assert within(240, lambda: reached(26, "'world_size': 3}"))
        join()
        assert [agent.wait(240) for agent in agents] == [0] * 4, [log.read_text() for log in logs]
        told = "".join(log.read_text() for log in logs)
    changes = re.findall(r"saved as .*?'world_size': (\d).* resumed as .*?'world_size': (\d)", told)
    # Before that some may have begun without the others.
    assert changes[-2:] == [("4", "3"), ("3", "4")], changes
    assert [row["step"] for row in steps(run)] == [row["step"] for row in steps(single)]
    assert losses(run) == pytest.approx(losses(single), rel=1e-4)
    one, two = (load_file(folder / "last.safetensors") for folder in (single, run))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)
    assert result(run)["val_loss"] == pytest.approx(result(single)["val_loss"], rel=1e-4)
    del store

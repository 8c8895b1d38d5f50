"""The command `tensorboard` starts TensorBoard on the runs that are named."""

import json
import os
import re
import subprocess
import sys
from urllib.request import urlopen

import pytest

from tests.command_line import PROJECT
from trainer.commands import tensorboard
from trainer.errors import CheckpointError, SetupError

LOCAL = ["--host", "127.0.0.1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["--logdir", "runs", *LOCAL]),
        (["runs/a"], ["--logdir", "runs/a", *LOCAL]),
        (["a"], ["--logdir", "runs/a", *LOCAL]),
        (["a", "runs/b"], ["--logdir_spec", "runs/a:runs/a,runs/b:runs/b", *LOCAL]),
        (["--port", "7000"], ["--port", "7000", "--logdir", "runs", *LOCAL]),
        (["a", "--host=::"], ["--host=::", "--logdir", "runs/a"]),
        (["--logdir", "runs/a", "--bind_all"], ["--logdir", "runs/a", "--bind_all"]),
    ],
)
def test_runs_and_options(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        os.makedirs(f"runs/{name}")
    started = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append((path, arguments)))
    tensorboard.command(words)
    assert started == [
        (sys.executable, [sys.executable, "-P", "-m", "tensorboard.main", *expected])
    ]


def test_a_run_or_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError):
        tensorboard.command([])
    with pytest.raises(CheckpointError):
        tensorboard.command(["nothing"])


@pytest.mark.slow
def test_the_run_is_served(tmp_path):
    """A second program reads from the address that TensorBoard prints."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs" / "first")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "trainer", "tensorboard", "--port=0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        address = next(match[0] for line in lines if (match := re.search(r"http://\S+", line)))
        for _ in range(100):
            with urlopen(f"{address}data/runs", timeout=30) as answer:
                runs = json.load(answer)
            if runs:
                break
        assert runs == ["first"]
        process.terminate()
        process.stderr.read()

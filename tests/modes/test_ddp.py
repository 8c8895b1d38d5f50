"""mode=ddp beside what every mode is held to: gradients sent as bf16, experts chosen by samples."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import WHOLE, losses, ok, trainer
from tests.contexts import mode_of
from tests.training.test_resume_modes import kill, newest
from tests.training.test_training import same_run
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load
from trainer.telemetry.events import curves_of

ROUNDING = 2.0**-9  # of a number to bf16, relative; losses follow weights, which sums of gradients change
TRAINED = ["recipe=digits", "batch_size=60", "schedule.warmup_epochs=0"]
TRAINED += ["augment.crop=none", "epochs=1", "max_steps=20", "threads=1", "timeout=60", *WHOLE]
CNN = ["model.name=cnn_gn", "optimizer.lr=0.01"]
SYNC = ["model.name=cnn", "sync_bn=true", "optimizer.lr=0.001"]

# What each rank got in each step and ends with; and a model with a layer that no pass uses.
PLUGIN = """
import hashlib, json
import torch
from tests.modes import odd_models
from trainer.modes.ddp import DistributedDataParallel

class Noting(DistributedDataParallel):
    sent = ()

    def reduce_gradients(self):
        ranks = self.world.size
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.sent += (all(torch.equal((g * ranks).bfloat16().float() / ranks, g) for g in gradients),)

    def close(self):
        weights = b"".join(p.detach().numpy().tobytes() for p in self._parameters)
        noted = {"bf16": self.sent, "weights": hashlib.sha256(weights).hexdigest()}
        with open(f"rank{self.world.rank}.json", "w") as file:
            json.dump(noted, file)
        super().close()

import trainer.modes
trainer.modes.STRATEGIES["ddp"] = Noting
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "noting.py").write_text(PLUGIN)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, CNN),
        (2, ["model.name=Unused", "precision=fp16", "optimizer.lr=0.1"]),
        (2, [*CNN, "accumulate=2", "clip_grad_norm=0.5", "model.freeze=1", "ema=0.9"]),
        pytest.param(2, [*SYNC, "compile=true"], marks=pytest.mark.full("compiling takes a minute")),
        pytest.param(2, [*CNN, "compile=true"], marks=pytest.mark.full("compiling takes a minute")),
        pytest.param(2, SYNC, marks=pytest.mark.full),
    ],
)
def test_compressed_gradients_train_as_single_does_and_keep_replicas_alike(ranks, words, folder):
    words = [*TRAINED, "plugin=noting", *words]
    ok(*words, "mode=single", f"output={folder / 'single'}", cwd=folder)
    ok(*words, "mode=ddp", f"nproc={ranks}", "ddp.compress=bf16", f"output={folder / 'run'}", cwd=folder, timeout=600)
    assert losses(folder / "run") == pytest.approx(losses(folder / "single"), rel=ROUNDING)
    single, ours = (curves_of(folder / name)["train/grad_norm"][2] for name in ("single", "run"))
    assert len(ours) == 20 and ours[0] == pytest.approx(single[0], rel=ROUNDING)
    noted = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert noted == noted[:1] * ranks, "ranks drift apart"
    assert noted[0]["bf16"] == [True] * 20


@pytest.mark.slow
def test_a_compressed_run_goes_on_where_it_was_killed(tmp_path):
    plain, ranks, run = [*TRAINED, *CNN, "save.every_steps=5"], ["mode=ddp", "nproc=3"], tmp_path / "run"
    words = [*plain, "ddp.compress=bf16"]
    ok(*words, *ranks, f"output={tmp_path / 'whole'}")
    kill(12, *words, *ranks, f"output={run}", rank=1)
    assert newest(run) == 10
    changed = trainer(*plain, *ranks, "resume=auto", f"output={run}")
    assert changed.returncode == 2 and "ddp.compress" in changed.stderr, "another rounding is another run"
    shutil.copytree(run, tmp_path / "single")
    assert "step 10 of 20" in ok(*words, *ranks, "resume=auto", f"output={run}").stdout
    same_run(run, tmp_path / "whole")
    ok(*words, "mode=single", "resume=auto", f"output={tmp_path / 'single'}")
    assert losses(tmp_path / "single") == pytest.approx(losses(run), rel=ROUNDING)


def test_half_of_the_bytes_are_exchanged_to_measure_communication(monkeypatch):
    alone = World(Place(), torch.device("cpu"), 1, ("cpu",))
    sizes = {}
    for words in ("null", "bf16"):
        mode = mode_of(load(None, "mode=ddp", f"ddp.compress={words}"), alone, (4, 1, 2, 2))
        mode.setup(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
        monkeypatch.setattr(mode, "all_reduce_seconds", lambda size, budget: size)
        sizes[words] = mode._exchanged(1.0).seconds
    assert sizes["null"] == 4 * 15 and sizes["bf16"] == 2 * 15


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_that_samples_choose_train_as_on_one_device(accumulate, tmp_path):
    """Which experts a rank's part of a batch needs differs from batch to batch, and from rank to rank."""
    words = ["recipe=digits", "plugin=tests.modes.odd_models", "model.name=Routed", "batch_size=4", "max_steps=30"]
    words += [*WHOLE, f"accumulate={accumulate}", "optimizer.weight_decay=0.1", "augment.crop=none", "threads=1"]
    for name, mode in (("single", ["mode=single"]), ("ddp", ["mode=ddp", "nproc=2"])):
        said = ok(*words, *mode, f"output={tmp_path / name}")
        assert "find_unused" not in said.stdout + said.stderr
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("single", "ddp"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)

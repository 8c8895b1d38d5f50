"""Properties of mode=ddp alone: gradients sent as bf16, and experts that samples choose."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import QUIET, WHOLE, losses, ok, trainer
from tests.strategies import create_strategy
from tests.training.whole_runs import assert_same_run, kill, newest
from trainer.distributed.world import World
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.telemetry.events import read_curves

# Relative error of rounding to bf16. Losses depend on weights, which sums of gradients change.
ROUNDING = 2.0**-9
TRAINED = ["recipe=digits", "batch_size=60", "schedule.warmup_epochs=0"]
TRAINED += ["augment.crop=none", "epochs=1", "max_steps=20", "threads=1", "timeout=60", *WHOLE]
CNN = ["model.name=cnn_gn", "optimizer.lr=0.01"]
SYNC = ["model.name=cnn", "sync_bn=true", "optimizer.lr=0.001"]

# Gradients of each rank in each step and its final weights; and a model with a layer that no pass
# uses.
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
        rounded = [(g * ranks).bfloat16().float() / ranks for g in gradients]
        self.sent += (all(map(torch.equal, rounded, gradients)),)

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
        pytest.param(
            2, [*SYNC, "compile=true"], marks=pytest.mark.full("compiling takes a minute")
        ),
        pytest.param(2, [*CNN, "compile=true"], marks=pytest.mark.full("compiling takes a minute")),
        pytest.param(2, SYNC, marks=pytest.mark.full),
    ],
)
def test_compressed_gradients_train_as_single_does_and_keep_replicas_alike(ranks, words, folder):
    words = [*TRAINED, "plugin=noting", *words]
    ok(*words, "mode=single", f"output={folder / 'single'}", cwd=folder)
    ok(
        *words,
        "mode=ddp",
        f"nproc={ranks}",
        "ddp.compress=bf16",
        f"output={folder / 'run'}",
        cwd=folder,
        timeout=600,
    )
    assert losses(folder / "run") == pytest.approx(losses(folder / "single"), rel=ROUNDING)
    single, ours = (read_curves(folder / name)["train/grad_norm"][2] for name in ("single", "run"))
    assert len(ours) == 20
    assert ours[0] == pytest.approx(single[0], rel=ROUNDING)
    noted = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert noted == noted[:1] * ranks, "ranks drift apart"
    assert noted[0]["bf16"] == [True] * 20


@pytest.mark.slow
def test_a_compressed_run_goes_on_where_it_was_killed(tmp_path):
    plain = [*TRAINED, *CNN, "save.every_steps=5"]
    ranks = ["mode=ddp", "nproc=3"]
    run = tmp_path / "run"
    words = [*plain, "ddp.compress=bf16"]
    ok(*words, *ranks, f"output={tmp_path / 'whole'}")
    kill(12, *words, *ranks, f"output={run}", rank=1)
    assert newest(run) == 10
    changed = trainer(*plain, *ranks, "resume=auto", f"output={run}")
    assert changed.returncode == 2 and "ddp.compress" in changed.stderr, (
        "another rounding is another run"
    )
    shutil.copytree(run, tmp_path / "single")
    assert "step 10 of 20" in ok(*words, *ranks, "resume=auto", f"output={run}").stdout
    assert_same_run(run, tmp_path / "whole")
    ok(*words, "mode=single", "resume=auto", f"output={tmp_path / 'single'}")
    assert losses(tmp_path / "single") == pytest.approx(losses(run), rel=ROUNDING)


def test_half_of_the_bytes_are_exchanged_to_measure_communication(monkeypatch):
    alone = World(Place(), torch.device("cpu"), 1, ("cpu",))
    sizes = {}
    for words in ("null", "bf16"):
        mode = create_strategy(
            load(None, "mode=ddp", f"ddp.compress={words}"),
            alone,
            (4, 1, 2, 2),
        )
        mode.setup(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
        monkeypatch.setattr(mode, "all_reduce_seconds", lambda size, budget: size)
        sizes[words] = mode._exchanged(1.0).seconds
    assert sizes["null"] == 4 * 15 and sizes["bf16"] == 2 * 15


@pytest.mark.slow(cases=["1"])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_that_samples_choose_train_as_on_one_device(accumulate, tmp_path):
    """The experts that a rank's local batch needs differ between batches and between ranks."""
    words = [
        "recipe=digits",
        "plugin=tests.modes.odd_models",
        "model.name=Routed",
        "batch_size=4",
        "max_steps=30",
        *WHOLE,
        f"accumulate={accumulate}",
        "optimizer.weight_decay=0.1",
        "augment.crop=none",
        "threads=1",
    ]
    for name, mode in (("single", ["mode=single"]), ("ddp", ["mode=ddp", "nproc=2"])):
        message = ok(*words, *mode, f"output={tmp_path / name}")
        assert "find_unused" not in message.stdout + message.stderr
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("single", "ddp"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)


# Models that compare the samples of a batch, or divide by a standard deviation.
ROWS = """
import torch
from torch import nn
from tests.modes.odd_models import Plain
from trainer import register_model

class Neighbours(Plain):
    def between(self, x):
        if not self.training:
            return x
        return x + 0.1 * x[torch.cdist(x, x).topk(4, largest=False).indices].mean(1)

class GhostNorm(nn.BatchNorm1d):
    def forward(self, x):
        parts = x.chunk(2) if self.training else [x]
        return torch.cat([super(GhostNorm, self).forward(part) for part in parts])

class Ghost(Plain):
    def __init__(self):
        super().__init__()
        self.norm = GhostNorm(16)
    def between(self, x):
        return self.norm(x)

class Deviation(Plain):
    def forward(self, x):
        x = (x - x.mean()) / x.std() if self.training else x
        if not x.isfinite().all():
            raise ValueError("inputs that are all alike")
        return super().forward(x)

class Parts(Plain):
    "Another layer is used where rows are few."
    def between(self, x):
        return x if len(x) < 8 else self.c(x)

class FewParts(Plain):
    def between(self, x):
        return x if len(x) >= 8 else self.extra(x)
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(16, 16)

class Pixels(Plain):
    "Looks values of pixels up, which are from 0 to 1."
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 1)
    def forward(self, x):
        return super().forward(self.table((x.clamp(max=1) * 255).relu().long())[..., 0])

for kind in (Neighbours, Ghost, Deviation, Parts, FewParts, Pixels):
    register_model(kind.__name__)(lambda num_classes, channels, image_size, kind=kind: kind())
"""
SLOW = pytest.mark.slow


@pytest.mark.full(
    cases=["Deviation-dp-False", "FewParts-ddp nproc=2-False", "Deviation-fsdp nproc=2-True"]
)
@pytest.mark.parametrize(
    ("model", "mode", "apart"),
    [
        ("Neighbours", "ddp nproc=2", True),
        pytest.param("Ghost", "ddp nproc=2", True, marks=SLOW),
        pytest.param("Deviation", "ddp nproc=2", True, marks=SLOW),
        pytest.param("Deviation", "dp", False, marks=SLOW),
        pytest.param("Parts", "ddp nproc=2", False, marks=SLOW),
        pytest.param("FewParts", "ddp nproc=2", False, marks=SLOW),
        pytest.param("Pixels", "ddp nproc=2", False, marks=SLOW),
        pytest.param("Neighbours", "fsdp nproc=2", True, marks=SLOW),
        pytest.param("Deviation", "fsdp nproc=2", True, marks=SLOW),
    ],
)
def test_a_model_that_needs_more_samples_or_a_deviation_trains(model, mode, apart, tmp_path):
    """The run equals that of one device, except if only the samples of one rank are compared
    (`apart`).
    """
    (tmp_path / "rows.py").write_text(ROWS)
    words = [
        "recipe=digits",
        "plugin=rows",
        f"model.name={model}",
        "batch_size=32",
        "max_steps=4",
        "epochs=1",
        "threads=1",
    ]
    words += ["optimizer.lr=0.01", "augment.crop=none", *QUIET]
    ok(
        *words,
        f"mode={mode.split()[0]}",
        *mode.split()[1:],
        f"output={tmp_path / 'run'}",
        cwd=tmp_path,
    )
    if not apart:
        ok(*words, "mode=single", f"output={tmp_path / 'single'}", cwd=tmp_path)
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)

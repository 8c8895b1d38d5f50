"""Replicas are compared: an unwanted difference ends a run and is named, and an allowed one does
not.
"""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import BARE, WHOLE, latest, losses, ok, result, trainer
from trainer.errors import RecipeError
from trainer.training.replicas import CHUNK, compute_digests

PLUGIN = """
import json, os
import torch
from torch import nn
from trainer import register_model
from trainer.training import replicas

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def between(self, x):
        return x

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)))))
        return self.out(self.between(x))

class ActNorm(Net):
    def __init__(self):
        super().__init__()
        self.scale, self.done = nn.Parameter(torch.ones(16)), False

    def between(self, x):
        if self.training and not self.done:
            self.scale.data.copy_(1 / (x.std(0) + 1e-3))
            self.done = True
        return x * self.scale

class Late(Net):
    passes = 0

    def between(self, x):
        self.passes += self.training
        if self.passes == 26:  # four passes look at the model, and their counts are taken back
            self.second.bias.data.add_(x.detach().mean(0))
        return x

class ByRank(Net):
    passes = 0

    def between(self, x):
        self.passes += self.training
        return x * (1 + int(os.environ["RANK"]) * (self.passes > 8))

class Dropping(Net):
    def between(self, x):
        return torch.dropout(x, 0.3, self.training)

class Clipped(Net):
    # The same on every rank: a function of the weights alone.
    def between(self, x):
        self.second.weight.data.clamp_(-0.2, 0.2)
        return x

class Running(Net):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16), persistent=persistent)

    def between(self, x):
        self.mean.add_((x.detach().mean(0) - self.mean) * self.training, alpha=0.5)
        return x - self.mean

KINDS = {"actnorm": ActNorm, "late": Late, "clipped": Clipped, "by_rank": ByRank,
    "dropping": Dropping}
LONG = "TRAINER_TEST_LONG"
for name, kind in KINDS.items():
    register_model(name)(lambda num_classes, channels, image_size, kind=kind: kind())
for name, persistent in {"kept": True, "left_out": False}.items():
    register_model(name)(lambda num_classes, channels, image_size,
        persistent=persistent: Running(persistent))

compare = replicas.ReplicaComparison.compare

def noting(comparison):
    with open(os.environ["TRAINER_TEST_COMPARED"], "a") as file:
        file.write(f"{comparison.state.position.step} ")
    compare(comparison)

replicas.ReplicaComparison.compare = noting
if LONG in os.environ:
    replicas.LONG_STEPS, replicas.LONG_SECONDS = int(os.environ[LONG]), 0.0
"""
RUN = [
    "recipe=digits",
    "plugin=drifting",
    "data.name=synthetic",
    "data.samples=320",
    "data.val_samples=32",
    "data.image_size=8",
    "data.channels=1",
    "augment.crop=none",
    "batch_size=32",
    "optimizer.lr=0.05",
    "threads=1",
]
DDP = ["mode=ddp", "nproc=2"]
REPLICAS = {
    "fsdp": ["mode=fsdp", "nproc=2"],
    "pipeline": [
        "mode=pipeline",
        "nproc=4",
        "pipeline.stages=2",
        "pipeline.schedule=gpipe",
        "pipeline.microbatches=1",
    ],
}


@pytest.fixture
def start(tmp_path):
    """Run the command line in a folder that has the plugin."""
    (tmp_path / "drifting.py").write_text(PLUGIN)

    def run(name, *words, call=ok, logged=WHOLE, long=None):
        noted = {"TRAINER_TEST_COMPARED": str(tmp_path / f"{name} compared")}
        if long is not None:
            noted["TRAINER_TEST_LONG"] = str(long)
        return call(
            *latest(*RUN, *BARE, *logged, *words),
            f"output={tmp_path / name}",
            cwd=tmp_path,
            env=noted,
        )

    return run


def compared(tmp_path, name):
    return [int(step) for step in (tmp_path / f"{name} compared").read_text().split()]


def test_weights_that_a_pass_writes_from_its_images_end_ddp_after_the_first_step(start, tmp_path):
    completed = start("run", "model.name=actnorm", *DDP, "save.every_steps=1", call=trainer)
    assert completed.returncode == RecipeError.code and len(completed.stderr.splitlines()) == 1
    assert "scale" in completed.stderr and "mode=single" in completed.stderr
    assert [row for row in (tmp_path / "run" / "checkpoints").glob("step-*")] == []
    assert result(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_a_rank_that_drifts_later_is_found_before_the_next_checkpoint(start, tmp_path):
    completed = start(
        "run", "model.name=late", *DDP, "epochs=9", "save.every_steps=20", call=trainer
    )
    assert completed.returncode == RecipeError.code, completed.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert saved == ["step-00000020"]


@pytest.mark.full(but=["words0-5", "words1-2", "words2-3"])
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(
    "words", [[], ["ddp.compress=bf16"], ["precision=fp16", "accumulate=2", "batch_size=60"]]
)
def test_replicas_have_the_same_bits_on_any_number_of_ranks(ranks, words, start, tmp_path):
    """Drift by rounding would be let pass: the weights themselves are held against rank 0's."""
    start(
        "run",
        "model.name=clipped",
        "mode=ddp",
        f"nproc={ranks}",
        "clip_grad_norm=0.5",
        "epochs=1",
        *words,
    )
    assert compared(tmp_path, "run")


@pytest.mark.slow
def test_replicas_are_compared_after_powers_of_ten_and_at_each_save(start, tmp_path):
    words = ["data.samples=3520", "epochs=1", "save.every_steps=40", "logging.every_steps=5"]
    completed = start("run", "model.name=clipped", *DDP, *words, logged=())
    output = completed.stdout + completed.stderr
    assert not re.search(r"WARNING: .*\bmodel\.name=clipped\b", output), (
        "weights that depend on weights alone are equal"
    )
    steps = sorted(compared(tmp_path, "run"))
    assert steps[::2] == steps[1::2], "both ranks, at the same steps"
    assert steps[::2] == [1, 10, 40, 80, 100, 110]


@pytest.mark.slow
def test_a_gradient_that_depends_on_the_rank_ends_a_long_run(start):
    """The weights stay equal: ranks average what one of them computes from another model."""
    completed = start("run", "model.name=by_rank", *DDP, "epochs=2", call=trainer, long=10)
    assert completed.returncode == RecipeError.code
    assert "rank" in completed.stderr
    assert "mode=single" in completed.stderr


@pytest.mark.full(but=["words1", "words2"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["model.name=dropping"],
        ["model.name=dropping", "ddp.compress=bf16", "accumulate=2"],
        ["model.name=left_out", "ema=0.9"],
        ["model.name=cnn", "sync_bn=true"],
        ["model.name=resnet8", "precision=bf16", "model.freeze=1"],
        ["model.name=vit_tiny", "recompute=true", "optimizer.name=adamw"],
    ],
)
def test_a_comparison_of_gradients_leaves_no_trace(words, start, tmp_path):
    for name, long in {"compared": 1, "plain": 10**9}.items():
        start(name, *words, *DDP, "epochs=2", long=long)
    assert losses(tmp_path / "compared") == losses(tmp_path / "plain")
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("compared", "plain"))
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.full(cases=["kept-fsdp", "left_out-pipeline"])
@pytest.mark.slow
@pytest.mark.parametrize("mode", REPLICAS)
@pytest.mark.parametrize("model", ["kept", "left_out"])
def test_buffers_that_passes_read_are_rank_zeros_in_every_mode(mode, model, start, tmp_path):
    """The buffers may be in a checkpoint or not; ddp is equal, because torch broadcasts them in
    every pass.
    """
    for name, words in {"ddp": DDP, "other": REPLICAS[mode]}.items():
        start(name, f"model.name={model}", *words, "epochs=2")
    one = tmp_path / "ddp"
    two = tmp_path / "other"
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    assert result(two)["val_loss"] == pytest.approx(result(one)["val_loss"], rel=1e-6)
    torch.testing.assert_close(
        *(load_file(folder / "last.safetensors") for folder in (one, two)),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.slow
def test_evaluation_has_rank_zeros_buffers_also_where_checkpoints_leave_them_out(start, tmp_path):
    for name in ("kept", "left_out"):
        completed = start(name, f"model.name={name}", *DDP, "max_steps=3")
        output = completed.stdout + completed.stderr
        messages = re.findall(rf"WARNING: .*\bmodel\.name={name}\b.*", output)
        assert len(messages) == 1 and "buffer mean" in messages[0], (
            "ranks other than 0 lose what their images wrote"
        )
    assert result(tmp_path / "kept")["val_loss"] == result(tmp_path / "left_out")["val_loss"]


TENSORS = {
    "fp32": torch.randn(2, CHUNK + 3),
    "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "bf16": torch.randn(9).bfloat16(),
    "fp64": torch.randn(9).double(),
    "complex": torch.randn(9, dtype=torch.complex128),
    "integers": torch.arange(9),
    "flags": torch.tensor([True, False, False]),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_digest_shows_exchanged_numbers_and_one_that_changed(kind):
    tensor = TENSORS[kind]
    flat = tensor.reshape(-1)
    turned = flat.roll(1).reshape(tensor.shape)
    changed = flat.clone()
    changed[-1] = changed[-1].logical_not() if kind == "flags" else -changed[-1]
    digests = compute_digests(
        [tensor, tensor.clone(), turned, changed.reshape(tensor.shape)], torch.device("cpu")
    )
    assert digests[0] == digests[1]
    assert len({*digests.tolist()}) == 3


def test_a_digest_shows_signs_wherever_they_change():
    """A sum of products in 32 bits would lose every second pair of signs."""
    tensor = torch.randn(64)
    flipped = []
    for one in range(64):
        for other in range(one):
            flipped.append(tensor.clone())
            flipped[-1][[one, other]] *= -1
    digests = compute_digests([tensor, *flipped], torch.device("cpu"))
    assert len({*digests.tolist()}) == 1 + len(flipped)


def test_a_number_alone_has_a_digest_and_nothing_has_none():
    digests = compute_digests([torch.tensor(1.0), torch.tensor(-1.0)], torch.device("cpu"))
    assert len({*digests.tolist()}) == 2
    assert len(compute_digests([], torch.device("cpu"))) == 0

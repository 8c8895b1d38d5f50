"""`verify.every`: a step computed twice changes nothing, and a flipped bit is found and named."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import QUIET, latest, ok, result, trainer
from trainer.errors import RecipeError, SetupError
from trainer.modes.proofs import use_deterministic_kernels
from trainer.recipe import load

# A model with all that a pass may change: random numbers, statistics, and a counter of its own.
# FAULTY_IN flips a bit once, on FAULTY_RANK: in the weights or the optimizer's state in step 5, or
# in the verification before step 6.
PLUGIN = """
import os
import torch
from torch import nn
from trainer import register_model
from trainer.modes.base import Strategy
from trainer.optim.optimization import Updater
from trainer.training.steps import EagerSteps
from trainer.training.verifying import Verifier

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.layers(x) * (1 + 0.01 * (self.passes % 3))

@register_model("changing")
def changing(classes, channels, size):
    return Net()

@register_model("plain")
def plain(classes, channels, size):
    return Net().layers

FAULT = os.environ.get("FAULTY_IN") if os.environ.get("RANK", "0") == os.environ.get(
    "FAULTY_RANK", "0") else None
computed = 0

def flip(tensor):
    bits = tensor.detach().view(-1)[:1].view(torch.int32)
    bits ^= 1 << 22

def state_of(optimizer):
    return next(iter(optimizer.state.values()))["momentum_buffer"]

done = 0
begin, launch, update = EagerSteps.begin, EagerSteps.launch, Updater.step
compute = Verifier._compute_step

def begin_step(steps, lr):
    global done
    begin(steps, lr)
    done += 1
    if FAULT == "weight" and done == 5:
        flip(next(iter(steps.updater.parameters)))

def compute_step(verifier, *arguments):
    global computed
    computed += 1
    return compute(verifier, *arguments)

# The second computation of the verification before step 6, which is the second verification.
FAULTY = 4

def launch_pass(steps, *arguments, **options):
    weight = next(iter(steps.updater.parameters))
    if FAULT == "forward" and computed == FAULTY:
        flip(weight)
    loss = launch(steps, *arguments, **options)
    if FAULT == "forward" and computed == FAULTY:
        flip(weight)
    if FAULT == "gradient" and computed == FAULTY:
        flip(weight.grad)
    if FAULT == "kernels":
        steps.updater.parameters[0].grad.mul_(1 + 1e-3 * int.from_bytes(os.urandom(1)))
    return loss

def update_weights(updater, *arguments):
    norm = update(updater, *arguments)
    is_faulty = FAULT == "update" and computed == FAULTY
    if is_faulty or (FAULT == "optimizer" and (done, computed) == (5, 2)):
        flip(state_of(updater.optimizer))
    return norm

def is_late(verifier):
    return FAULT == "late" and done == 5

if "FAULTY_IN" in os.environ:
    Verifier.is_late = is_late
EagerSteps.begin, EagerSteps.launch = begin_step, launch_pass
Updater.step, Verifier._compute_step = update_weights, compute_step
"""
RUN = [
    "recipe=digits",
    "plugin=faulty",
    "model.name=changing",
    "epochs=1",
    "batch_size=48",
    "schedule.warmup_epochs=0",
    "threads=1",
]
EVERY = "verify.every=3"
DDP = ["mode=ddp", "nproc=2"]
# Micro-batches and cuts that a run measures may differ between two runs.
CUT = ["pipeline.microbatches=2", "pipeline.cuts=[2]"]


@pytest.fixture
def start(tmp_path):
    (tmp_path / "faulty.py").write_text(PLUGIN)

    def run(name, *words, call=ok, **env):
        words = latest(*RUN, *QUIET, *words, f"output={tmp_path / name}")
        return call(*words, cwd=tmp_path, env=env)

    return run


MODES = {
    "single": ["accumulate=2", "ema=0.9", "optimizer.name=adamw", "optimizer.lr=0.01"],
    "bf16": ["accumulate=3", "precision=bf16"],
    "evaluated": ["evaluate.every_steps=4", "model.name=plain", "recompute=false"],
    "clipped": ["clip_grad_norm=0.1", "augment.mixup=0.2", "optimizer.name=nadam"],
    "fp16": ["precision=fp16", "optimizer.name=muon", "model.name=cnn"],
    "ddp": [*DDP, "accumulate=2"],
    "ddp_clipped": [*DDP, "clip_grad_norm=0.1", "sync_bn=true"],
    "dp": ["mode=dp", "devices=[cpu,cpu]", "model.name=plain"],
    "fsdp": ["mode=fsdp", "nproc=2", "model.name=plain", "optimizer.name=adamw"],
    "replicas": ["mode=fsdp", "nproc=4", "fsdp.shards=2", "model.name=plain"],
    "split": ["mode=split", "devices=[cpu,cpu]", "model.name=plain"],
    "streams": ["mode=pipeline", "devices=[cpu,cpu]", "model.name=plain", *CUT],
    "pipeline": ["mode=pipeline", "nproc=2", "model.name=plain", "clip_grad_norm=0.1", *CUT],
    "local_sgd": ["mode=local_sgd", "nproc=2", "local_sgd.every=2"],
}


@pytest.mark.slow(but=["single", "ddp"])
@pytest.mark.parametrize("case", MODES)
def test_a_verified_run_is_the_same_to_the_bit(start, tmp_path, case):
    words = ["mode=single", "max_steps=12", *MODES[case]]
    completed = start("verified", *words, EVERY)
    assert completed.stdout.count("verify: ") == 1
    start("usual", *words)
    verified = load_file(tmp_path / "verified" / "last.safetensors")
    usual = load_file(tmp_path / "usual" / "last.safetensors")
    assert verified.keys() == usual.keys()
    assert [name for name in usual if not torch.equal(usual[name], verified[name])] == []


NAMES = {
    "weight": "layers.0.weight differs",
    "optimizer": "layers.0.weight//momentum_buffer differs",
    "forward": "loss was different",
    "gradient": "gradient of layers.0.weight was different",
    "update": "layers.0.weight//momentum_buffer was different",
}


@pytest.mark.slow(but=["weight", "forward"])
@pytest.mark.parametrize("fault", NAMES)
def test_a_flipped_bit_ends_a_run_and_its_rank_is_named(start, tmp_path, fault):
    words = [*DDP, EVERY, "max_steps=12", "save.every_steps=2"]
    completed = start("run", *words, call=trainer, FAULTY_IN=fault, FAULTY_RANK="1")
    assert completed.returncode == SetupError.code, completed.stdout
    assert "rank 1 (cpu): " in completed.stderr
    assert NAMES[fault] in completed.stderr
    assert "last verified after step 2" in completed.stderr
    # Step 6 was not saved.
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert saved[-1] == "step-00000004"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["gradient", "update"])
def test_a_flipped_bit_is_found_on_a_single_device(start, fault):
    completed = start("run", "mode=single", EVERY, "max_steps=12", call=trainer, FAULTY_IN=fault)
    assert completed.returncode == SetupError.code
    assert NAMES[fault] in completed.stderr


@pytest.mark.slow
def test_kernels_that_are_not_deterministic_are_no_fault(start, tmp_path):
    completed = start("run", "mode=single", EVERY, "max_steps=12", FAULTY_IN="kernels")
    assert completed.stdout.count("WARNING: verify.every=3") == 1
    assert result(tmp_path / "run")["status"] == "completed"


def test_a_rank_whose_time_is_over_asks_all_ranks(start):
    """The clock of rank 1 is ahead, so only this rank finds that 30 minutes are over."""
    words = [*DDP, "verify.every=30m", "max_steps=12"]
    completed = start("run", *words, FAULTY_IN="late", FAULTY_RANK="1")
    assert completed.stdout.count("verify: ") == 1


def test_kernels_are_deterministic_for_the_verification_only():
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.benchmark = True
    try:
        with use_deterministic_kernels():
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.backends.cudnn.benchmark
            assert torch.backends.cudnn.enabled == enabled
        assert torch.backends.cudnn.benchmark
        assert torch.get_deterministic_debug_mode() == before[0]
    finally:
        torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize("words", [["verify.every=0"], ["verify.every=30 m"]])
def test_a_wrong_interval_is_refused(words):
    with pytest.raises(RecipeError, match=r"verify\.every.*\b1000 or 30m"):
        load("digits", *words)

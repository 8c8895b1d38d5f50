"""Replayed passes of stages in one process are the launched ones, to the bit: one graph, or one for each action.

The CPU has graphs here: `tests.simulated.tape`. Its stages share one device; where they are to be on several, each has
a name of its own for the CPU.
"""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.command_line import result
from tests.simulated.tape import CpuRecorder
from tests.training.graphed_runs import differences, train
from trainer.errors import RecipeError
from trainer.models.balance import BlockCost
from trainer.modes.deferred_batchnorm import DeferredStatistics
from trainer.modes.pipeline.recorded import RecordedActions
from trainer.modes.pipeline.stages import Staged
from trainer.modes.pipeline.streams import Edge, StreamPipeline
from trainer.recipe import load
from trainer.recipe.checks import check_processes
from trainer.training import step_graphs

SGD = "optimizer.weight_decay=0.001 optimizer.nesterov=true"
ADAMW = "optimizer.name=adamw optimizer.lr=0.003 optimizer.weight_decay=0.1 optimizer.norm_weight_decay=0"
MUON = "optimizer.name=muon optimizer.lr=0.01 optimizer.weight_decay=0.05 optimizer.nesterov=true"
TWO, THREE = "devices=[cpu,cpu]", "devices=[cpu,cpu,cpu]"
FOUR = f"mode=pipeline pipeline.microbatches=4 {TWO}"


class Several(CpuRecorder):
    """Of several devices, each of which has memory of its own.

    Attributes:
        order: which recordings were replayed, over all devices.
    """

    def __init__(self, device, first=None):
        super().__init__(device)
        self.others = {}
        self.order = [] if first is None else first.order

    def beside(self, device):
        if device == self.device:
            return self
        if device not in self.others:
            self.others[device] = type(self)(device, self)
        return self.others[device]

    def _replay(self, recording):
        self.order.append(recording)
        super()._replay(recording)

    def close(self):
        super().close()
        for other in self.others.values():
            other.close()


def setup(self, model):
    """Names for the CPU by which stages are on a device each."""
    _setup(self, model)
    for number, lane in enumerate(self.lanes):
        lane.device = torch.device("cpu", number) if number else self.device
    self.world.drives = tuple(lane.device for lane in self.lanes)


def probe(self, traced, rows):
    """Cuts that are the same in every run: random numbers are drawn in the order of the stages."""
    return [BlockCost(1.0, 2.0, 8)] * (len(traced.cuts) + 1)


_setup = StreamPipeline.setup
ALIKE = [(Staged, "probe", probe)]
APART = [(StreamPipeline, "setup", setup)]


@functools.cache
def launched(words):
    """Muon's last bits depend on whether its rate is a tensor, on the CPU: of one device this run has tensors too."""
    tensors = [(step_graphs, "WARM", 10**9)] if "muon" in words else []
    with tempfile.TemporaryDirectory() as folder:
        left = train(f"{words} graphs={'true' if tensors else 'false'}", Path(folder), [*ALIKE, *tensors])
        left.result = result(folder)
        return left


def replayed(words, apart, patches=(), kind=Several, graphs="true", folder=None, **more):
    """A run that records its steps, with each stage on a device of its own, or all on one."""
    with tempfile.TemporaryDirectory() as other:
        patches = [*ALIKE, *(APART if apart else ()), *patches]
        left = train(f"{words} graphs={graphs}", Path(folder or other), patches, kind=kind, **more)
        if "stop_after" not in more:
            left.result = result(folder or other)
        return left


WORDS = {
    "split": f"mode=split {TWO} {SGD} clip_grad_norm=1",
    "split in three": f"mode=split {THREE} {ADAMW} accumulate=2 ema=0.9",
    "one micro-batch": f"mode=pipeline pipeline.microbatches=1 {TWO} {SGD}",
    "two micro-batches": f"mode=pipeline pipeline.microbatches=2 {TWO} {ADAMW} ema=0.9 clip_grad_norm=0.5",
    "four in three stages": f"mode=pipeline pipeline.microbatches=4 {THREE} {SGD}",
    "a smaller last one": f"mode=pipeline pipeline.split_size=3 {TWO} {SGD} accumulate=2 batch_size=16",
    "each micro-batch's statistics": f"{FOUR} pipeline.deferred_batch_norm=false {SGD}",
    "muon": f"{FOUR} {MUON}",
    "fp16": f"{FOUR} precision=fp16 model.name=mlp {SGD} accumulate=2",
    "bf16": f"{FOUR} precision=bf16 {ADAMW}",
    "frozen": f"{FOUR} model.name=cnn model.freeze=1 {SGD}",
    "frozen, in three": f"mode=pipeline pipeline.microbatches=2 model.name=cnn model.freeze=2 {THREE} {SGD}",
    "mixed": f"{FOUR} augment.mixup=0.2 augment.cutmix=0.5 {SGD}",
    "steps that may be skipped": f"{FOUR} on_nonfinite=skip:2 {SGD}",
    "vit": f"{FOUR} model.name=vit_tiny {ADAMW}",
}


@pytest.mark.parametrize("apart", [False, True], ids=["one device", "several"])
@pytest.mark.parametrize("name", WORDS)
def test_replayed_steps_are_the_launched_ones(name, apart):
    played = replayed(WORDS[name], apart)
    assert differences(launched(WORDS[name]), played) == []
    assert played.said == [] and played.replayed_to_the_end

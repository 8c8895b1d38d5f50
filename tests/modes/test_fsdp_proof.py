"""A sharded model is held against the whole one before the first step, rows of all ranks."""

import pytest

from tests.command_line import QUIET, trainer

MODEL = """
import torch
from torch import nn
from trainer import register_model

class Net(nn.Module):
    def __init__(self, features, classes, at):
        super().__init__()
        self.first, self.last = nn.Linear(features, 32), nn.Linear(32, classes)
        at(self).register_hook(hook)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))

def hook(gradient):
    rows = torch.ones(len(gradient), 1)
    rows[-1] = 0.3  # the last rank's
    return gradient * rows

@register_model("part")
def part(num_classes, channels, image_size):
    return Net(channels * image_size**2, num_classes, lambda net: net.first.weight)
"""


@pytest.mark.slow
def test_a_hook_that_shards_lose_is_refused_by_the_rank_that_has_its_rows(tmp_path):
    (tmp_path / "hooked.py").write_text(MODEL)
    words = ["recipe=digits", "plugin=hooked", "model.name=part", "max_steps=2", "nproc=2", *QUIET, "output=run"]
    done = trainer(*words, "mode=fsdp", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "first.weight" in line and "mode=ddp" in line
    assert trainer(*words, "mode=ddp", cwd=tmp_path).returncode == 0

"""State of a model beside its tensors, by torch's `get_extra_state`, wherever weights go."""

from __future__ import annotations

import io
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import WHOLE, losses, ok, result, trainer
from trainer.errors import CheckpointError, RecipeError
from trainer.models.extra_state import extra_state, load_extra_state, require_kept
from trainer.models.undisturbed import undisturbed
from trainer.models.zoo import initialise
from trainer.saving.weights import read_weights

GAINING = """
import torch
from torch import nn
from trainer import register_model

class Gain(nn.Module):
    gain, seen = 1.0, None

    def get_extra_state(self):
        return {"gain": self.gain, "seen": self.seen, "name": "gain"}

    def set_extra_state(self, state):
        self.gain, self.seen = state["gain"], state["seen"]

    def forward(self, x):
        if self.training:
            self.gain = min(2.0, self.gain + 0.05)
            self.seen = torch.ones(1) if self.seen is None else torch.cat([self.seen, torch.ones(1)])  # grows
        return self.gain * torch.tanh(x)

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 16), Gain(), nn.Linear(16, num_classes))

register_model("gaining")(make)
"""
RUN = ["recipe=digits", "plugin=gains", "model.name=gaining", "epochs=2", "max_steps=14", "save.every_steps=4"]
RUN += ["save.keep=9", "augment.crop=none", "threads=1", *WHOLE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gains")
    (folder / "gains.py").write_text(GAINING)
    ok(*RUN, "mode=single", "output=whole", cwd=folder)
    return folder


@pytest.mark.parametrize(
    "mode", ["mode=single", "mode=ddp nproc=2", pytest.param("mode=fsdp nproc=2", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_with_it(mode, runs, tmp_path):
    killed = tmp_path / "killed"
    shutil.copytree(runs / "whole", killed)
    for step in (8, 12, 14):
        shutil.rmtree(killed / f"checkpoints/step-{step:08d}", ignore_errors=True)
    assert "resuming at step 4" in ok(*RUN, *mode.split(), f"output={killed}", "resume=auto", cwd=runs).stdout
    whole = losses(runs / "whole")
    assert losses(killed) == (whole if mode == "mode=single" else pytest.approx(whole, rel=1e-5))
    assert load_file(killed / "last.safetensors")["2._extra_state"].dtype == torch.uint8


def test_what_reads_the_weights_has_it(runs):
    """`evaluate`, and a program with the model at hand; bare torch with what the guide says."""
    newest = max(path.name for path in (runs / "whole/checkpoints").iterdir())
    for weights in ("whole", "whole/last.safetensors", f"whole/checkpoints/{newest}"):
        said = ok("evaluate", f"checkpoint={weights}", "plugin=gains", cwd=runs).stdout
        assert f"val loss {result(runs / 'whole')['val_loss']:.4f}" in said
    namespace = {}
    exec(GAINING.replace('register_model("gaining")(make)', ""), namespace)
    ours, theirs = namespace["make"](10, 1, 8), namespace["make"](10, 1, 8)
    initialise(ours, read_weights(runs / "whole")[0], "here", whole=True)
    assert ours[2].gain == pytest.approx(1.7) and len(ours[2].seen) == 14
    state = load_file(runs / "whole/last.safetensors")
    for name in state:
        if name.endswith("_extra_state"):
            state[name] = torch.load(io.BytesIO(state[name].numpy()))
    theirs.load_state_dict(state)
    assert theirs[2].gain == ours[2].gain
    torch.save(ours.state_dict(), runs / "plain.pt")
    initialise(fresh := namespace["make"](10, 1, 8), read_weights(runs / "plain.pt")[0], "here", whole=True)
    assert fresh[2].gain == ours[2].gain


@pytest.mark.parametrize("mode", ["mode=split", "mode=local_sgd nproc=2"])
def test_modes_that_would_lose_it_are_refused(mode, runs, tmp_path):
    done = trainer(*RUN, *mode.split(), f"output={tmp_path / 'run'}", cwd=runs)
    assert done.returncode == 2 and "2._extra_state" in done.stderr and "mode=ddp" in done.stderr, done.stderr


class Held(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Unsafe:
    """What a file of weights may not run."""

    def __reduce__(self):
        return (pytest.fail, ("it was executed",))


class Giving(nn.Linear):
    """Gives what it does not take."""

    def get_extra_state(self):
        return {"n": 1}


def test_what_no_module_takes_back_is_refused_by_name():
    model = nn.Sequential(Giving(2, 2))
    with undisturbed([model], torch.device("cpu")), pytest.raises(RecipeError, match=r"Giving.*set_extra_state"):
        require_kept(model, "mine", "single", True)
    initialise(model, nn.Sequential(nn.Linear(2, 2)).state_dict(), "here", whole=True)


def test_only_what_is_safe_to_load_is_saved_and_loaded():
    kept = {"a": [1, 2.5, None, True, "x"], "b": torch.arange(3), "c": {"d": (1, 2)}}
    model, other = nn.Sequential(Held(kept)), nn.Sequential(Held(None))
    load_extra_state(other, extra_state(model), "here")
    assert torch.equal(other[0].state.pop("b"), kept.pop("b")) and other[0].state == kept
    for state in (Unsafe(), {"f": lambda: 1}):
        with pytest.raises(RecipeError, match=r"^0\._extra_state"):
            extra_state(nn.Sequential(Held(state)))
    file = io.BytesIO()
    torch.save(Unsafe(), file)
    hostile = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    for saved in ({}, {"0._extra_state": hostile}, {"0._extra_state": hostile[:9]}):
        with pytest.raises(CheckpointError, match=r"0\._extra_state"):
            load_extra_state(other, saved, "here")

"""Activations that are computed anew in the backward pass: in every mode the run that keeps them, to the bit."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import QUIET, ok, result, trainer
from tests.contexts import mode_of
from trainer.errors import RecipeError
from trainer.models import recompute as module
from trainer.models.recompute import recompute, runs_of
from trainer.models.zoo import build
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load

CPU = torch.device("cpu")
PLUGIN = """
from torch import nn
from torchvision.ops import StochasticDepth
from trainer import register_model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.depth = StochasticDepth(0.4, "row")

    def forward(self, x):
        return x + self.depth(self.layers(x))

@register_model("noisy")
def noisy(num_classes, channels=1, image_size=8):
    first = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU(inplace=True), nn.Dropout()
    return nn.Sequential(*first, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""
NOISY = ["recipe=digits", "plugin=noisy", "model.name=noisy", "batch_size=16", "optimizer.lr=0.01", "threads=1"]
NOISY += ["max_steps=4", "save.every_steps=2", *QUIET]
WAYS = {
    "single": ["mode=single", "clip_grad_norm=1", "ema=0.9"],
    "bf16": ["mode=single", "precision=bf16", "accumulate=2", "model.freeze=1"],
    "dp": ["mode=dp", "devices=[cpu,cpu]"],
    "ddp": ["mode=ddp", "nproc=2", "accumulate=2", "sync_bn=true"],
    "split": ["mode=split", "devices=[cpu,cpu]", "pipeline.cuts=[4]"],
    "streams": ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.cuts=[4]", "pipeline.microbatches=2"],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.cuts=[4]", "pipeline.microbatches=2"],
    "fsdp": ["mode=fsdp", "nproc=2", "model.name=cnn"],
    "fsdp, kept whole": ["mode=fsdp", "nproc=2", "model.name=resnet8", "data.channels=3", "fsdp.reshard=false"],
    "local_sgd": ["mode=local_sgd", "nproc=2", "local_sgd.every=2"],
    "hogwild": ["mode=hogwild", "nproc=1"],  # alone: more are not repeatable
}
FAST = ("single", "split", "bf16")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy")
    (folder / "noisy.py").write_text(PLUGIN)
    return folder


def with_all(way):
    """The words of a way, and those of all others."""
    return [*(word for word in NOISY if word[:11] not in {w[:11] for w in way}), *way]


@pytest.fixture(scope="module")
def trained(home):
    """The folder of a way's run."""

    @cache
    def folder(way, recomputed):
        path = home / f"{way} {recomputed}"
        ok(*with_all(WAYS[way]), f"recompute={recomputed}", f"output={path}", cwd=home)
        return path

    return folder


def everything(folder):
    """All tensors that a run saved: weights, optimizer, buffers, averages, random states."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    assert len(files) > 1
    return {f"{file} {name}": tensor for file in files for name, tensor in load_file(folder / file).items()}


@pytest.mark.parametrize(
    "way", [*FAST, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in FAST)]
)
def test_every_mode_has_the_bits_of_the_run_that_keeps_activations(way, trained):
    kept, anew = trained(way, "false"), trained(way, "true")
    torch.testing.assert_close(everything(anew), everything(kept), rtol=0, atol=0)
    assert result(kept)["recompute"] is None and result(anew)["recompute"]
    assert result(anew)["losses"] == result(kept)["losses"]


def test_it_is_free_on_resume(trained, home):
    """Stopped, continued the other way, stopped and continued as it began."""
    words = with_all([*WAYS["single"], "output=turned", "save.every_steps=1"])
    assert trainer(*words, "recompute=false", cwd=home, env={"TRAINER_FAULT": "kill@0:2"}).returncode < 0
    words += ["resume=auto"]
    assert trainer(*words, "recompute=true", cwd=home, env={"TRAINER_FAULT": "kill@0:4"}).returncode < 0
    told = ok(*words, "recompute=false", cwd=home).stdout
    assert "resuming at step 3 of 4" in " ".join(told.split())
    ours, theirs = (load_file(run / "last.safetensors") for run in (home / "turned", trained("single", "false")))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert result(home / "turned")["recompute"] is None


# What goes wrong without care.


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.mul_(2))


def set_up(*blocks):
    recipe = load(None, "mode=single", "recompute=true", "precision=fp32")
    world = World(Place(), CPU, 1, ("cpu",), (CPU,))
    strategy = mode_of(recipe, world, (8, 4))
    model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 10))
    drawn = torch.get_rng_state()
    strategy.setup(model)
    return torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [Counting, InPlace])
def test_a_block_that_counts_or_changes_its_input_is_refused(kind):
    with pytest.raises(RecipeError, match="use recompute=false"):
        set_up(kind())


def test_a_model_without_blocks_is_refused():
    with pytest.raises(RecipeError, match=r"no blocks.*use recompute=false"):
        set_up()


def noisy_block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))


def test_a_proof_leaves_nothing():
    torch.manual_seed(0)
    block = noisy_block()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    assert set_up(block)
    torch.testing.assert_close(dict(block.state_dict()), before, rtol=0, atol=0)


MUTANTS = {
    "statistics twice": ("_uncounted", lambda norms: module.nullcontext()),
    "dropout anew": ("checkpoint", lambda *a, **k: CHECKPOINT(*a, **k | {"preserve_rng_state": False})),
}
CHECKPOINT = module.checkpoint


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_sees(mutant, monkeypatch):
    set_up(noisy_block())
    monkeypatch.setattr(module, *MUTANTS[mutant])
    with pytest.raises(RecipeError, match="recompute=true would train another model"):
        set_up(noisy_block())


@pytest.mark.parametrize("name", ["cnn", "fast_cnn_small", "resnet8", "vit_tiny", "mobilenet_v3_small"])
def test_blocks_of_models(name):
    """They come in the model's order, no module twice, and hold most of its layers; names stay as they are."""
    model = build(load(None, f"model.name={name}").model, 10, 3, 32)
    names = list(model.state_dict())
    found = runs_of(model)
    flat = [part for run in found for part in run]
    order = [path for path, _ in model.named_modules()]
    assert len(set(flat)) == len(flat) and flat == sorted(flat, key=order.index)
    inside = sum(p.numel() for part in flat for p in model.get_submodule(part).parameters())
    assert inside > 0.5 * sum(p.numel() for p in model.parameters())
    recompute(model, found)
    assert list(model.state_dict()) == names

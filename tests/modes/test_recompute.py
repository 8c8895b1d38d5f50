"""Activations that are computed anew in the backward pass: in every mode the run that keeps them, to the bit."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from tests.command_line import QUIET, environment, ok, result, trainer
from tests.contexts import mode_of
from trainer.errors import RecipeError
from trainer.models import recompute as module
from trainer.models.recompute import recompute, runs_of
from trainer.models.zoo import build
from trainer.modes import base
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
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
SOMETIMES = {"fsdp, kept whole": pytest.mark.full("as fsdp")}


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
    "way",
    [*FAST, *(pytest.param(way, marks=SOMETIMES.get(way, pytest.mark.slow)) for way in WAYS if way not in FAST)],
)
def test_every_mode_has_the_bits_of_the_run_that_keeps_activations(way, trained):
    kept, anew = trained(way, "false"), trained(way, "true")
    torch.testing.assert_close(everything(anew), everything(kept), rtol=0, atol=0)
    assert result(kept)["recompute"] is None and result(anew)["recompute"]
    assert result(anew)["losses"] == result(kept)["losses"]


COMPILED = [way for way in WAYS if way not in ("single", "dp")]  # replicas of dp are not compiled
TRACED = "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='eager')\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["single", *(pytest.param(way, marks=pytest.mark.full) for way in COMPILED)])
def test_every_mode_has_these_bits_where_blocks_are_compiled(way, tmp_path):
    """Traced, and run as they are: what torch's compiler makes of a graph rounds otherwise."""
    (tmp_path / "noisy.py").write_text(PLUGIN + TRACED)
    kept, anew = both_ways(with_all(WAYS[way]), tmp_path)
    torch.testing.assert_close(everything(anew), everything(kept), rtol=0, atol=0)
    assert result(anew)["losses"] == result(kept)["losses"]


@pytest.mark.full
@pytest.mark.parametrize("way", ["single", "fsdp"])
def test_compiled_kernels_train_as_those_of_the_whole_model(way, tmp_path):
    (tmp_path / "noisy.py").write_text(PLUGIN)
    kept, anew = both_ways(with_all(sorted({*WAYS[way], "model.name=cnn"})), tmp_path)
    torch.testing.assert_close(everything(anew), everything(kept), rtol=1e-4, atol=1e-6)


def both_ways(words, folder):
    """The folders of two compiled runs, which keep activations, and compute them anew."""
    for recomputed in ("false", "true"):
        ok(*words, "compile=true", f"recompute={recomputed}", f"output={recomputed}", cwd=folder)
    return folder / "false", folder / "true"


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


class Dense(nn.Module):
    """Its layers take a list, which grows afterwards, or by themselves."""

    def __init__(self, collects):
        super().__init__()
        self.collects, self.layers = collects, nn.ModuleList(Joined(4 * n, collects) for n in (1, 2, 3))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            out = layer(found)
            found += [] if self.collects else [out]
        return found[-1]


class Joined(nn.Module):
    def __init__(self, width, collects):
        super().__init__()
        self.inner, self.collects = nn.Linear(width, 4), collects

    def forward(self, found):
        out = self.inner(torch.cat(found, 1)).relu()
        found += [out] if self.collects else []
        return out


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.mul_(2))


def made(*blocks, words=(), **more):
    recipe = load(None, "mode=single", "recompute=true", "precision=fp32", *words)
    strategy = mode_of(recipe, World(Place(), CPU, 1, ("cpu",), (CPU,)), (8, 4), **more)
    model = nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 10))
    drawn = torch.get_rng_state()
    strategy.setup(model)
    return strategy, torch.equal(torch.get_rng_state(), drawn)


def set_up(*blocks):
    return made(*blocks)[1]


@pytest.mark.parametrize("kind", [Counting, InPlace])
def test_a_block_that_counts_or_changes_its_input_is_refused(kind):
    with pytest.raises(RecipeError, match="use recompute=false"):
        set_up(kind())


@pytest.mark.parametrize("collects", [True, False])
def test_a_list_that_grows_is_the_one_that_there_was(collects):
    model = Dense(collects)
    assert len(runs_of(model)) > 2
    kept = torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()])
    recompute(model, runs_of(model))
    assert all(map(torch.equal, torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()]), kept))


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


class Racing(nn.Linear):
    """Adds up in another order each time, as a GPU's kernels do in bf16, unless torch is asked for one order."""

    def forward(self, x):
        out = super().forward(x)
        noise = 0 if torch.are_deterministic_algorithms_enabled() else 0.05 * torch.randn(out.shape, generator=DICE)
        return out * (1 + noise)


DICE = torch.Generator()


def test_kernels_that_race_are_no_fault():
    assert set_up(nn.Sequential(Racing(4, 4), nn.ReLU(), Racing(4, 4), nn.ReLU()))
    assert not torch.are_deterministic_algorithms_enabled()


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


# Compiled blocks, within what computes them anew.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))

    def forward(self, x):
        return x + self.layers(x).relu()


def compiled_passes(**more):
    """Gradients and buffers of two passes, bytes kept for a backward pass, and how often something was compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    strategy, _ = made(Residual(), Residual(), noisy_block(), words=["compile=true"], **more)
    strategy.train()
    inputs, kept = torch.randn(8, 4), {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = strategy.outputs(inputs)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    state = {**{name: p.grad for name, p in strategy.named_parameters().items()}, **strategy.named_buffers()}
    return state, sum(kept.values()), counters["stats"]["unique_graphs"]


def same(one, two):
    return [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]


@pytest.mark.full("real kernels; runs of compiled blocks are slow tests")
def test_compiled_blocks_draw_the_same_twice_and_keep_less():
    """In a process of its own, in which torch's compiler finds all that it imports as it is in a user's."""
    program = f"from {__name__} import *\nwith pytest.MonkeyPatch.context() as patch: compare_compiled(patch)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare_compiled(monkeypatch):
    """With the same compiled blocks whose activations are kept; of two blocks, and with one of three."""
    found, anew, compiled = compiled_passes()
    assert compiled == 3
    some, between, compiled = compiled_passes(recomputed=1)
    assert compiled == 3
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: CHECKPOINT(*a, **k | {"preserve_rng_state": False}))
    with monkeypatch.context() as unproven:
        unproven.setattr(
            base, "recompute_proven", lambda strategy, model, *runs: recompute(model, runs[0], compiles=True)
        )
        mutant, *_ = compiled_passes()
    monkeypatch.setattr(module, "checkpoint", plainly)
    kept, every, compiled = compiled_passes()
    assert compiled == 3
    assert same(kept, found) == [] and same(kept, some) == [] and same(kept, mutant)
    assert anew < between < every and anew < 0.5 * every


def plainly(run, *args, use_reentrant, preserve_rng_state, context_fn, early_stop, **kwargs):
    return run(*args, **kwargs)

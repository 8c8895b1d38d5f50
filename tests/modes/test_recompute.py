"""Activations that are recomputed in the backward pass: every mode equals, to the bit, the run that
keeps them.
"""

import random
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from tests.command_line import QUIET, environment, ok, result, trainer
from tests.strategies import create_strategy
from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.models import recompute as module
from trainer.models.recompute import list_runs, recompute
from trainer.models.zoo import build
from trainer.modes import base
from trainer.processes.rank import Place
from trainer.recipe import load
from trainer.saving.journal import JOURNAL, read_journal

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
PLUGIN = """
from torch import nn
from torchvision.ops import StochasticDepth
from trainer import register_model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Dropout(0.3))
        self.depth = StochasticDepth(0.4, "row")

    def forward(self, x):
        return x + self.depth(self.layers(x))

@register_model("noisy")
def noisy(num_classes, channels=1, image_size=8):
    norm = nn.BatchNorm2d(8, momentum=None)
    first = nn.Conv2d(channels, 8, 3, padding=1), norm, nn.ReLU(inplace=True), nn.Dropout()
    return nn.Sequential(*first, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes))
"""
NOISY = [
    "recipe=digits",
    "plugin=noisy",
    "model.name=noisy",
    "batch_size=16",
    "optimizer.lr=0.01",
    "threads=1",
]
NOISY += ["max_steps=4", "save.every_steps=2", *QUIET]
WAYS = {
    "single": ["mode=single", "clip_grad_norm=1", "ema=0.9"],
    "bf16": ["mode=single", "precision=bf16", "accumulate=2", "model.freeze=1"],
    "dp": ["mode=dp", "devices=[cpu,cpu]"],
    "ddp": ["mode=ddp", "nproc=2", "accumulate=2", "sync_bn=true"],
    "split": ["mode=split", "devices=[cpu,cpu]", "pipeline.cuts=[4]"],
    "streams": [
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "pipeline.cuts=[4]",
        "pipeline.microbatches=2",
    ],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.cuts=[4]", "pipeline.microbatches=2"],
    "fsdp": ["mode=fsdp", "nproc=2", "model.name=cnn"],
    "fsdp, kept whole": [
        "mode=fsdp",
        "nproc=2",
        "model.name=resnet8",
        "data.channels=3",
        "fsdp.reshard=false",
    ],
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
    """Return the arguments of a variant, and those of all others."""
    return [
        *(word for word in NOISY if word[:11] not in {w[:11] for w in way}),
        *way,
    ]


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
    """Return all tensors that a run saved: weights, optimizer, buffers, averages, random states."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    assert len(files) > 1
    return {
        f"{file} {name}": tensor
        for file in files
        for name, tensor in load_file(folder / file).items()
    }


@pytest.mark.full(but=["ddp", "hogwild"])
@pytest.mark.slow(cases=["bf16", "split"])
@pytest.mark.parametrize(
    "way",
    [
        *FAST,
        *(
            pytest.param(way, marks=SOMETIMES.get(way, pytest.mark.slow))
            for way in WAYS
            if way not in FAST
        ),
    ],
)
def test_every_mode_has_the_bits_of_the_run_that_keeps_activations(way, trained):
    kept = trained(way, "false")
    anew = trained(way, "true")
    torch.testing.assert_close(everything(anew), everything(kept), rtol=0, atol=0)
    assert result(kept)["recompute"] is None and result(anew)["recompute"]
    assert result(anew)["losses"] == result(kept)["losses"]


COMPILED = [way for way in WAYS if way not in ("single", "dp")]  # replicas of dp are not compiled
TRACED = (
    "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='eager')\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["single", *(pytest.param(way, marks=pytest.mark.full) for way in COMPILED)]
)
def test_every_mode_has_these_bits_where_blocks_are_compiled(way, tmp_path):
    """Blocks are traced and run without compiling, because torch's compiler rounds differently."""
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
    """Return the folders of two compiled runs; one keeps activations and one recomputes them."""
    for recomputed in ("false", "true"):
        ok(*words, "compile=true", f"recompute={recomputed}", f"output={recomputed}", cwd=folder)
    return folder / "false", folder / "true"


@pytest.mark.slow
def test_recompute_may_change_on_resume(trained, home):
    """The run is stopped, resumed with the other setting, stopped again and resumed with the first
    setting.
    """
    words = with_all([*WAYS["single"], "output=turned", "save.every_steps=1"])
    assert (
        trainer(*words, "recompute=false", cwd=home, env={"TRAINER_FAULT": "kill@0:2"}).returncode
        < 0
    )
    words += ["resume=auto"]
    assert (
        trainer(*words, "recompute=true", cwd=home, env={"TRAINER_FAULT": "kill@0:4"}).returncode
        < 0
    )
    ok(*words, "recompute=false", cwd=home)
    attempts, _ = read_journal(home / "turned" / JOURNAL)
    assert attempts[-1].resumed == 3
    assert result(home / "turned")["steps"] == 4
    ours, reference = (
        load_file(run / "last.safetensors") for run in (home / "turned", trained("single", "false"))
    )
    torch.testing.assert_close(ours, reference, rtol=0, atol=0)
    assert result(home / "turned")["recompute"] is None


# --- errors that a careless implementation makes.


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Dense(nn.Module):
    """A dense block whose layers accept a list, which grows afterwards, or single tensors."""

    def __init__(self, collects):
        super().__init__()
        self.collects, self.layers = (
            collects,
            nn.ModuleList(Joined(4 * n, collects) for n in (1, 2, 3)),
        )

    def forward(self, x):
        actual = [x]
        for layer in self.layers:
            out = layer(actual)
            actual += [] if self.collects else [out]
        return actual[-1]


class Joined(nn.Module):
    def __init__(self, width, collects):
        super().__init__()
        self.inner = nn.Linear(width, 4)
        self.collects = collects

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
    strategy = create_strategy(
        recipe,
        World(Place(), CPU, 1, ("cpu",), (CPU,)),
        (8, 4),
        **more,
    )
    model = nn.Sequential(
        nn.Linear(4, 4),
        *blocks,
        nn.Linear(4, 10),
    )
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
    assert len(list_runs(model)) > 2
    kept = torch.autograd.grad(
        model(torch.ones(2, 4)).sum(),
        [*model.parameters()],
    )
    recompute(model, list_runs(model))
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()]),
            kept,
        )
    )


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.draw()


DRAWS = {
    "Python": random.random,
    "NumPy": np.random.rand,
    "Python, by chance": lambda: 9 if random.random() < 0.5 else 1,
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_block_draws_the_same_numbers_on_the_host_twice(kind, hooked):
    """Random numbers after a step are the same with and without recomputing."""

    def gradients(recomputes):
        torch.manual_seed(0)
        if hooked:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
            for block in model:
                block[0].register_forward_hook(lambda layer, inputs, output: output * DRAWS[kind]())
        else:
            model = nn.Sequential(
                nn.Linear(4, 4),
                *(Drawing(DRAWS[kind]) for _ in range(3)),
            )
        if recomputes:
            recompute(model, list_runs(model))
        random.seed(0)
        np.random.seed(0)
        collected = []
        for _ in range(4):
            collected += torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()])
        return collected

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(RecipeError, match=r"no blocks.*use recompute=false"):
        set_up()


def noisy_block():
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
    )


def test_a_proof_leaves_nothing():
    torch.manual_seed(0)
    block = noisy_block()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    assert set_up(block)
    torch.testing.assert_close(
        dict(block.state_dict()),
        before,
        rtol=0,
        atol=0,
    )


MUTANTS = {
    "statistics twice": ("_keep_statistics", lambda norms: nullcontext()),
    "dropout anew": (
        "checkpoint",
        lambda *a, **k: CHECKPOINT(*a, **k | {"preserve_rng_state": False}),
    ),
}
CHECKPOINT = module.checkpoint


class Racing(nn.Linear):
    """Adds up in another order each time, as a GPU's kernels do in bf16, unless torch is asked for
    one order.
    """

    def forward(self, x):
        out = super().forward(x)
        noise = (
            0
            if torch.are_deterministic_algorithms_enabled()
            else 0.05 * torch.randn(out.shape, generator=DICE)
        )
        return out * (1 + noise)


DICE = torch.Generator()


def test_kernels_that_race_are_no_fault():
    assert set_up(
        nn.Sequential(
            Racing(4, 4),
            nn.ReLU(),
            Racing(4, 4),
            nn.ReLU(),
        )
    )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_sees(mutant, monkeypatch):
    set_up(noisy_block())
    monkeypatch.setattr(module, *MUTANTS[mutant])
    with pytest.raises(RecipeError, match=r"recompute=true .*\(.+\).*; use "):
        set_up(noisy_block())


@pytest.mark.slow(cases=["mobilenet_v3_small"])
@pytest.mark.parametrize(
    "name", ["cnn", "fast_cnn_small", "resnet8", "vit_tiny", "mobilenet_v3_small"]
)
def test_blocks_of_models(name):
    """Blocks come in the model's order, contain no module twice and most of its layers, and leave
    names unchanged.
    """
    model = build(load(None, f"model.name={name}").model, 10, 3, 32)
    names = list(model.state_dict())
    actual = list_runs(model)
    flat = [part for run in actual for part in run]
    order = [path for path, _ in model.named_modules()]
    assert len(set(flat)) == len(flat)
    assert flat == sorted(flat, key=order.index)
    inside = sum(p.numel() for part in flat for p in model.get_submodule(part).parameters())
    assert inside > 0.5 * sum(p.numel() for p in model.parameters())
    recompute(model, actual)
    assert list(model.state_dict()) == names


# --- compiled blocks that recompute.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(64, 4),
        )

    def forward(self, x):
        return x + self.layers(x).relu()


def compiled_passes(**more):
    """Return gradients and buffers of two passes, the bytes kept for a backward pass, and the
    number of compilations.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    strategy, _ = made(
        Residual(),
        Residual(),
        noisy_block(),
        words=["compile=true"],
        **more,
    )
    strategy.train()
    inputs = torch.randn(8, 4)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = strategy.outputs(inputs)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    state = {
        **{name: p.grad for name, p in strategy.named_parameters().items()},
        **strategy.named_buffers(),
    }
    return state, sum(kept.values()), counters["stats"]["unique_graphs"]


def same(one, two):
    return [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]


@pytest.mark.full("real kernels; runs of compiled blocks are slow tests")
def test_compiled_blocks_draw_the_same_twice_and_keep_less():
    """A separate process imports everything like a user's process, because torch's compiler sees
    the imports.
    """
    program = (
        f"from {__name__} import *\nwith pytest.MonkeyPatch.context() as patch: "
        "compare_compiled(patch)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr


def compare_compiled(monkeypatch):
    """Compare with the same compiled blocks that keep their activations: two blocks, and one of
    three.
    """
    actual, anew, compiled = compiled_passes()
    assert compiled == 3
    some, between, compiled = compiled_passes(recomputed=1)
    assert compiled == 3
    monkeypatch.setattr(
        module,
        "checkpoint",
        lambda *a, **k: CHECKPOINT(*a, **k | {"preserve_rng_state": False}),
    )
    with monkeypatch.context() as unproven:
        unproven.setattr(
            base,
            "recompute_proven",
            lambda strategy, model, *runs: recompute(model, runs[0], compiles=True),
        )
        mutant, *_ = compiled_passes()
    monkeypatch.setattr(module, "checkpoint", plainly)
    kept, every, compiled = compiled_passes()
    assert compiled == 3
    assert same(kept, actual) == []
    assert same(kept, some) == []
    assert same(kept, mutant)
    assert anew < between < every and anew < 0.5 * every


def plainly(run, *args, use_reentrant, preserve_rng_state, context_fn, early_stop, **kwargs):
    return run(*args, **kwargs)


FORCE = """
import torch
from torch import nn
from trainer import register_model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.two(torch.tanh(self.norm(self.one(x)))))

class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.Sequential(Block(), Block()), nn.Linear(64, 10)

    def forward(self, x):
        with torch.enable_grad():
            x = x.flatten(1).requires_grad_()
            (force,) = torch.autograd.grad(self.blocks(x).square().sum(), x, create_graph=True)
        return self.out(force)

@register_model("force")
def force(num_classes, channels, image_size):
    return Force()
"""


@pytest.mark.slow
def test_a_model_that_takes_gradients_in_its_forward_has_two_backward_passes_through_a_block(
    tmp_path,
):
    """The outputs are the gradient of an energy.

    Both passes leave running statistics as the forward pass set them.
    """
    (tmp_path / "noisy.py").write_text(FORCE)
    kept = tmp_path / "kept"
    anew = tmp_path / "anew"
    for folder, recomputed in ((kept, "false"), (anew, "true")):
        words = with_all(
            ["mode=single", "model.name=force", f"recompute={recomputed}", f"output={folder}"]
        )
        ok(*words, cwd=tmp_path)
    torch.testing.assert_close(everything(anew), everything(kept), rtol=0, atol=0)

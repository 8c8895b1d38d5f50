"""A small model of each torchvision family, and ten of timm: each trains in every kind of mode, and
is loaded again.
"""

from __future__ import annotations

import importlib.util
import math
import shutil

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.command_line import PROJECT, QUIET, losses, ok, trainer
from tests.models.families import FAMILIES, TIMM
from trainer import load_recipe
from trainer.commands.evaluate import evaluate_run
from trainer.data import open_datasets
from trainer.training.api import train

# These models compute something else in evaluation, or depend on their inputs' size.
UNCUT = (
    "levit_128s",
    "mobilevit_xxs",
)
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm: pip install '.[timm]'"
)
full = pytest.mark.full("every family")
SAMPLE = ("mnasnet", "googlenet")  # torchvision loads these with code of their own.
CASES = [
    *(
        pytest.param(
            *FAMILIES[family],
            id=family,
            marks=[full] * (family not in SAMPLE),
        )
        for family in FAMILIES
    ),
    *(
        pytest.param(
            f"timm:{name}", size, id=name, marks=[full] * (name != "resnet10t") + [needs_timm]
        )
        for name, size in TIMM.items()
    ),
]
SPLIT = ["mode=split", "devices=[cpu,cpu]"]
STREAMS = [
    "mode=pipeline",
    "pipeline.schedule=streams",
    "devices=[cpu,cpu]",
    "pipeline.microbatches=2",
]
RANKS = ["mode=pipeline", "pipeline.schedule=1f1b", "nproc=2", "pipeline.microbatches=2"]
DDP = ["mode=ddp", "nproc=2"]
PLAIN = [
    "data.name=synthetic",
    "data.samples=8",
    "data.val_samples=6",
    "model.num_classes=3",
    "batch_size=4",
    *QUIET,
]
PLAIN += ["epochs=2", "optimizer.lr=0.001", "optimizer.momentum=0", "threads=1"]


@pytest.fixture
def runs(tmp_path):
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # up to a gigabyte each


def bare(file):
    """Return the model named in the file's metadata, with the file's weights, loaded like the guide
    does.
    """
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    if facts["model"].startswith("timm."):
        import timm

        model = eval(facts["model"], {"timm": timm})
    else:
        model = eval(facts["model"], {"torchvision": torchvision})
    weights = load_file(file)
    if "mnasnet" in facts.get("model", ""):
        plain = weights
        weights = model.state_dict()
        assert plain.keys() == weights.keys()
        weights.update(plain)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def loss_by_hand(model, recipe):
    data = open_datasets(recipe)
    mean, std = (torch.tensor(value)[:, None, None] for value in (data.mean, data.std))
    index = torch.arange(len(data.val)) % len(data.val.labels)
    with torch.no_grad():
        return cross_entropy(
            model((data.val.images[index] / 255 - mean) / std), data.val.labels[index]
        ).item()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_family(name, size, runs, full):
    words = [f"model.name={name}", f"data.image_size={size}", *PLAIN]
    recipe = load_recipe(None, *words, "mode=single", f"output={runs}/single")
    trained = train(recipe)
    rows = losses(runs / "single")
    # The run looks as if it was killed in the second epoch.
    shutil.rmtree(runs / "single" / "checkpoints" / "step-00000004")
    again = train(recipe.replace(resume="auto"))
    assert losses(runs / "single") == rows and again["val_loss"] == trained["val_loss"]
    for weights in (
        runs / "single" / "last.safetensors",
        runs / "single" / "checkpoints" / "step-00000004",
    ):
        assert evaluate_run(str(weights))["val_loss"] == pytest.approx(
            trained["val_loss"], rel=1e-4
        )
    model = bare(runs / "single" / "last.safetensors")
    assert loss_by_hand(model, recipe) == pytest.approx(trained["val_loss"], rel=1e-3)
    if not full:
        return
    for mode, extra in {
        "split": SPLIT,
        "streams": STREAMS,
        "ranks": RANKS,
        "ddp": DDP,
    }.items():
        if name.removeprefix("timm:") in UNCUT and mode != "ddp":
            refused = trainer(*words, *extra, f"output={runs}/{mode}", cwd=PROJECT)
            assert refused.returncode == 2 and "model.name=" in refused.stderr
            continue
        ok(*words, *extra, f"output={runs}/{mode}", cwd=PROJECT)
        own = losses(runs / mode)
        assert len(own) == 4 and all(map(math.isfinite, own))
        assert mode != "split" or own == pytest.approx(rows, rel=1e-3)
        shutil.rmtree(runs / mode / "checkpoints" / "step-00000004")
        ok(*words, "mode=single", "resume=auto", f"output={runs}/{mode}", cwd=PROJECT)
        assert losses(runs / mode)[:2] == own[:2]
        bare(runs / mode / "last.safetensors")
        shutil.rmtree(runs / mode)


def test_every_family_of_torchvision_is_here():
    def source(name):
        return torchvision.models.get_model_builder(name).__module__

    known_names = torchvision.models.list_models(module=torchvision.models)
    assert {source(name) for name in known_names} == {source(name) for name, _ in FAMILIES.values()}

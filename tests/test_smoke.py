"""A test of every mode and schedule, resume, options and predict: each supported torch has to pass
it.

`./launch.sh test --versions` runs this file with the lowest and the newest torch, each in an
environment of its own. The exact and the long tests stay with the environment that `./launch.sh
test` uses.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version

import pytest

from tests.command_line import PROJECT, QUIET, losses, ok, result
from tests.modes.ways import EXACT, PIPELINE, WORKERS
from tests.training.whole_runs import assert_ends_like, kill
from trainer.modes.pipeline.torch_schedules import SCHEDULES

BASE = ["recipe=digits", "batch_size=64", "optimizer.lr=0.001", "augment.crop=none"]
BASE += ["schedule.warmup_epochs=0", "epochs=1", "save.every_steps=5", "timeout=60", *QUIET]
NET = ["model.name=cnn_gn"]
WAYS = {
    **EXACT,
    "zbv 2x2": [
        *PIPELINE,
        "nproc=4",
        "pipeline.stages=2",
        "pipeline.schedule=zbv",
    ],  # skipped where torch is older
}
VIRTUAL = [*SCHEDULES][2:]  # several stages a rank; the V-shaped last, where this torch has them
SWIN = ["model.name=swin_t", "data.channels=3", "data.image_size=32", "max_steps=2"]
# Features that a new torch may have changed: compilers, casts, parametrized optimizers, other
# families of models.
OPTIONS = {
    "compile": ["mode=ddp", "nproc=2", "compile=true"],
    "compiled stages": [*PIPELINE, "nproc=2", "compile=true"],
    "fp16": ["mode=ddp", "nproc=2", "precision=fp16"],
    "bf16 stages": [*PIPELINE, "nproc=2", "precision=bf16", "pipeline.schedule=interleaved1f1b"],
    "sync_bn": ["mode=ddp", "nproc=2", "model.name=cnn", "sync_bn=true"],
    "deferred BatchNorm": [
        *PIPELINE,
        "nproc=2",
        "model.name=cnn",
        f"pipeline.schedule={VIRTUAL[-2]}",
    ],
    "a ViT in stages": [
        *PIPELINE,
        "nproc=2",
        "model.name=vit_tiny",
        f"pipeline.schedule={VIRTUAL[-1]}",
    ],
    "swin_t in stages": [*PIPELINE, "nproc=2", *SWIN],
    "everything": [
        "mode=ddp",
        "nproc=2",
        "ema=0.9",
        "augment.mixup=0.2",
        "clip_grad_norm=1",
        "accumulate=2",
    ],
    "everything in stages": [
        *PIPELINE,
        "nproc=2",
        "ema=0.9",
        "augment.mixup=0.2",
        "clip_grad_norm=1",
        "accumulate=2",
    ],
    "deterministic": ["mode=single", "model.name=cnn", "deterministic=true"],
    **WORKERS,
}


def lowest():
    """The lowest torch and torchvision that pyproject.toml declares."""
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {
        name: re.search(rf"^{name}>=([\d.]+)$", "\n".join(declared), re.M)[1]
        for name in ("torch", "torchvision")
    }


def numbers(text):
    return [int(part) for part in re.match(r"[\d.]+\d", text)[0].split(".")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The epoch in mode=single, uninterrupted."""
    folder = tmp_path_factory.mktemp("smoke") / "single"
    ok(*BASE, *NET, "mode=single", f"output={folder}")
    return folder


def test_this_torch_is_in_the_declared_range():
    for name, least in lowest().items():
        assert numbers(version(name)) >= numbers(least), f"{name} {version(name)} is below {least}"


@pytest.mark.full("two runs each; test_parity.py trains the same table in one run each")
@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_train_has_the_losses_of_single(way, whole, tmp_path):
    """Killed on its way and continued: the run that was not stopped."""
    words = [*BASE, *NET, *WAYS[way], f"output={tmp_path / 'run'}", "resume=auto"]
    kill(12, *words)
    ok(*words)
    assert_ends_like(tmp_path / "run", whole)


@pytest.mark.full("long, and for other versions of torch")
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_trains(option, tmp_path):
    words = OPTIONS[option]
    net = [] if any(word.startswith("model.name") for word in words) else NET
    ok(*BASE, *net, *words, f"output={tmp_path / 'run'}", timeout=600)
    actual = losses(tmp_path / "run")
    assert result(tmp_path / "run")["status"] == "completed"
    assert len(actual) == 2 if "swin" in option else sum(actual[-5:]) < sum(actual[:5])


@pytest.mark.full("tests/commands/predict and others test each of these")
def test_commands_that_use_a_run(whole, tmp_path):
    """Evaluate, predict, plan and compare."""
    evaluated = ok("evaluate", f"checkpoint={whole}", "mode=single", *QUIET[:1])
    assert f"{100 * result(whole)['val_top1']:.1f}" in evaluated.stdout
    predicted = ok(
        "predict", f"checkpoint={whole}", "devices=[cpu,cpu]", f"output={tmp_path / 'labels'}"
    )
    assert "360" in predicted.stdout
    assert len((tmp_path / "labels" / "predictions.csv").read_text().splitlines()) == 361
    ok("plan", "recipe=digits", "devices=[cpu,cpu]")
    compared = ok(
        "compare",
        "recipe=digits",
        "modes=[single,ddp]",
        "devices=[cpu,cpu]",
        "repeats=2",
        "max_steps=10",
        f"output={tmp_path / 'compared'}",
        timeout=400,
    )
    assert "ddp" in compared.stdout

"""Whole runs through the real command line: the numbers of a mode, the files of a run, and
interrupted runs.

Importing torch costs seconds and a torchrun five: tests share a run where they look at different
sides of it.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file

from tests import warm
from tests.command_line import (
    QUIET,
    environment,
    free_port,
    losses,
    ok,
    result,
    steps,
    torchrun,
    trainer,
    wait_for,
    written,
)
from tests.data.photo_folders import photo
from tests.training.whole_runs import SAME, assert_same_run
from trainer import train
from trainer.recipe import load, shipped_recipes
from trainer.saving.steps_file import STEP_COLUMNS


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """mode=single, the run that all others must equal."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    ok(*SAME, "mode=single", "model.name=cnn_gn", f"output={folder}")
    return folder


def test_files_of_a_run(reference):
    names = {path.name for path in reference.iterdir()}
    assert {
        "recipe.yaml",
        "result.json",
        "steps.csv",
        "last.safetensors",
        "best.safetensors",
        "checkpoints",
    } <= names
    run_result = result(reference)
    assert run_result["status"] == "completed"
    assert run_result["steps"] == 20
    assert run_result["data"]["val_samples"] == 360
    assert run_result["throughput"]["samples_per_sec"] > 0 and run_result["step_time_s"]["p95"] > 0
    assert (
        0 <= run_result["data_wait_fraction"] < 1 and run_result["peak_memory_bytes"]["cpu"] > 2**20
    )
    assert steps(reference)[0].keys() == {*STEP_COLUMNS}


def test_golden_losses(reference):
    """The first losses of the default model on the default data: a change of maths anywhere shows
    here.
    """
    assert losses(reference)[:3] == pytest.approx([2.3573520, 2.3600483, 2.3316798], rel=1e-3)


@pytest.mark.slow
def test_weights_load_into_bare_torchvision(tmp_path):
    words = [
        "recipe=resnet50",
        "mode=single",
        "data.name=synthetic",
        "data.image_size=32",
        "data.samples=8",
        "data.val_samples=4",
        "batch_size=4",
        "epochs=1",
        "model.num_classes=10",
        "save.keep=2",
        *QUIET,
    ]
    ok(*words, f"output={tmp_path / 'run'}")
    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(load_file(tmp_path / "run" / "last.safetensors"), strict=True)
    with safe_open(tmp_path / "run" / "last.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["ema"] == "false"


# ---------------------------------------------------------------------------------------------
# every recipe


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A photo folder of two classes, made here."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 16), ("val", 6)):
        for number in range(count):
            name = f"{number}.{'jpg' if number % 4 > 1 else 'png'}"
            photo(
                root / split / ("cat", "dog")[number % 2] / name,
                (48, 40),
                seed=number,
            )
    return root


LIGHT = {  # networks for what is no matter of size; the full counts take the recipe's own
    "vit_b_16": "vit_tiny",
    "swin_t": "vit_tiny",
    "convnext_tiny": "cnn_gn",
    "resnet50": "resnet18",  # The test test_weights_load_into_bare_torchvision trains it.
    "resnet50_v2": "resnet18",
    "resnet50_8gpu": "resnet18",
}


SLOW = (
    "cifar10_distilled",
    "cifar10_fast",
    "cifar10_fast_gpu",
    "finetune",
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
)
LARGE = ("resnet18", "resnet50_v2", "resnet50_8gpu")


@pytest.mark.slow(cases=["probe", "swin_t", "finetune_small", "vit_b_16"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] * (name in LARGE) + [pytest.mark.slow] * (name in SLOW)
        )
        for name in shipped_recipes()
    ],
)
def test_every_recipe_trains_two_steps(name, photos, tmp_path, full):
    """The images are synthetic if the recipe's must be downloaded; the network and everything else
    are the recipe's.

    Through the Python API, in this process: an import of torch for each would cost half a minute.
    """
    data = load(name).data
    words = [
        "mode=single",
        "threads=1",
        "compile=false",
        "optimizer.lr=0.001",
        "batch_size=8",
        "accumulate=1",
    ]
    words += ["max_steps=2", "epochs=1", *QUIET]
    if name in LIGHT and not full:
        words += [f"model.name={LIGHT[name]}"]
    if data.name == "imagefolder":
        words += [
            f"data.root={photos}",
            "data.image_size=32",
            "data.resize=null",
            "data.train_size=null",
            "model.weights=null",
            "data.workers=0",
        ]
    elif data.name != "digits":
        size, channels = (28, 1) if "mnist" in data.name else (32, 3)
        words += ["data.name=synthetic", f"data.image_size={size}", f"data.channels={channels}"]
        words += ["data.samples=16", "data.val_samples=6"]
    if load(name).distill.weight is not None:  # The teacher is a run of the user.
        train(load("cifar10_fast", *words, f"output={tmp_path / 'teacher'}"))
        words += [f"distill.teacher={tmp_path / 'teacher'}"]
    train(load(name, *words, f"output={tmp_path / 'run'}"))
    run_result = result(tmp_path / "run")
    assert (
        run_result["steps"] == 2
        and run_result["status"] == "completed"
        and 0 < run_result["train_loss"] < 20
    )
    shutil.rmtree(tmp_path)  # up to 2 GB of checkpoints


@pytest.mark.slow
def test_resnet50_without_data_measures_speed(tmp_path):
    words = [
        "recipe=resnet50",
        "mode=single",
        "data.image_size=32",
        "batch_size=4",
        "max_steps=3",
        *QUIET,
    ]
    completed = ok(*words, f"output={tmp_path / 'run'}")
    run_result = result(tmp_path / "run")
    assert (
        "SYNTHETIC" in completed.stdout
        and "images/s" in completed.stdout
        and "data.root=" in completed.stdout
    )
    assert run_result["data"]["synthetic"]
    assert run_result["steps"] == 3
    assert run_result["throughput"]["samples_per_sec"] > 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "last.safetensors").exists()
    gone = trainer(*words, f"data.root={tmp_path / 'nowhere'}", f"output={tmp_path / 'other'}")
    assert gone.returncode == 3 and "nowhere" in gone.stderr and "Traceback" not in gone.stderr


def test_a_failure_before_the_first_step_leaves_no_folder_below_runs(photos, tmp_path):
    words = [
        "model.name=cnn",
        "mode=single",
        f"data.root={photos}",
        "batch_size=4",
        "model.init_from=/nowhere",
        *QUIET,
    ]
    completed = trainer("recipe=finetune", *words, cwd=tmp_path)
    assert completed.returncode == 4
    assert re.search(r"'/nowhere' .*python -m trainer runs\b", completed.stderr), completed.stderr
    assert list((tmp_path / "runs").iterdir()) == []


# ---------------------------------------------------------------------------------------- killed
# and resumed

PLUGIN = """
from torch import nn
from trainer import register_model

@register_model("dropped")
def build(num_classes, channels, image_size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(8 * image_size ** 2, num_classes),
    )
"""


@pytest.fixture
def dropped(tmp_path):
    """A model with dropout and BatchNorm, as a user's plugin."""
    (tmp_path / "mymodels.py").write_text(PLUGIN)
    return ["plugin=mymodels", "model.name=dropped"]


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=["single", "ddp 2", "ddp 4"])
def test_killed_in_mid_epoch_and_resumed_is_byte_equal(ranks, dropped, photos, tmp_path, full):
    if ranks > 1 and not full:
        pytest.skip("a sample of the modes; --all takes every one")
    mode = ["mode=single"] if ranks == 1 else ["mode=ddp", f"nproc={ranks}"]
    words = [
        "recipe=finetune",
        "model.weights=null",
        f"data.root={photos}",
        "data.image_size=16",
        "data.workers=1",
        "augment.auto=trivial",
        "ema=0.9",
        "batch_size=4",
        "epochs=6",
        "save.every_steps=2",
        *dropped,
        *mode,
    ]
    words += ["logging.every_steps=3", "logging.progress=false"]
    ok(*words, f"output={tmp_path / 'whole'}", cwd=tmp_path)
    for cut in (7, *range(3, 24)) if full else (7,):
        folder = tmp_path / f"cut{cut}"
        killed = trainer(
            *words, f"output={folder}", cwd=tmp_path, env={"TRAINER_FAULT": f"kill@0:{cut}"}
        )
        assert killed.returncode != 0
        ok(*words, f"output={folder}", "resume=auto", cwd=tmp_path)
        assert_same_run(folder, tmp_path / "whole")
        assert logged(folder) == logged(tmp_path / "whole")


def logged(folder):
    """Return (tag, step) of all raw TensorBoard events, each once, without those that depend on the
    clock.
    """
    timed = ("save/", "speed/", "view/validation images")
    seen = [value for value in written(folder) if not value[0].startswith(timed)]
    assert seen == sorted({*seen})
    assert ("train/loss", 3) in seen and any(tag == "val/top1" for tag, _ in seen)
    return seen


@pytest.mark.slow
def test_averaged_batch_norm_is_evaluated_as_it_is_saved(tmp_path):
    """Running statistics are each rank's own until they are settled; what is evaluated must be what
    is written.
    """
    words = [
        "recipe=digits",
        "mode=ddp",
        "nproc=2",
        "ema=0.9",
        "epochs=1",
        "optimizer.lr=0.01",
        *QUIET,
    ]
    ok(*words, f"output={tmp_path / 'run'}")
    completed = ok("evaluate", f"checkpoint={tmp_path / 'run'}")
    run_result = result(tmp_path / "run")
    assert f"val loss {run_result['val_loss']:.4f}" in completed.stdout
    assert f"{run_result['val_top1']:.2%}" in completed.stdout
    assert "on 360 held-out images" in completed.stdout


def test_rank_0_alone_refusing_ends_the_others_at_once(reference):
    begun = time.monotonic()
    completed = trainer(*SAME, "mode=ddp", "nproc=2", "model.name=cnn_gn", f"output={reference}")
    assert completed.returncode == 8 and len(completed.stderr.splitlines()) == 1, completed.stderr
    assert time.monotonic() - begun < 15


@pytest.mark.slow
def test_folders_that_are_taken(reference):
    again = trainer(*SAME, "mode=single", "model.name=cnn_gn", f"output={reference}")
    assert again.returncode == 8
    assert "resume=auto" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    other = trainer(
        *SAME, "mode=single", "model.name=cnn_gn", "seed=5", f"output={reference}", "resume=auto"
    )
    assert other.returncode == 2 and "seed: 0 there, 5 now" in other.stderr
    completed = ok(*SAME, "mode=single", "model.name=cnn_gn", f"output={reference}", "resume=auto")
    assert "done" in completed.stdout and len(steps(reference)) == 20
    assert result(reference)["throughput"]["samples_per_sec"] > 0, (
        "a finished run keeps what it measured"
    )
    logged(reference)


# ------------------------------------------------------------------------------------------- bad
# endings


@contextmanager
def started(*words, stderr=subprocess.STDOUT, **changes):
    """Start a run as a process, which does not outlive the block."""
    command = [sys.executable, "-m", "trainer", *words, *QUIET]
    pipe = subprocess.PIPE
    process = warm.Popen(
        command,
        env=environment(**changes),
        stdout=pipe,
        stderr=stderr,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_long_step_behind_a_checkpoint_is_not_waited_for(tmp_path):
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "save.every_steps=5",
        f"output={tmp_path / 'run'}",
    ]
    with started(*words, TRAINER_FAULT="hang@0:6") as process:
        wait_for((tmp_path / "run" / "checkpoints" / "step-00000005").exists, process, 90)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=50)  # sooner than `grace`
    assert process.returncode == 143 and "SIGTERM" in output, output
    # Nothing new was saved, and no step was given up, which would have written the stacks.
    checkpoints = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert checkpoints == ["step-00000005"]
    assert [*(tmp_path / "run").glob("stacks-*")] == []


@pytest.mark.slow(cases=["single SIGTERM"])
@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        (["mode=single"], signal.SIGTERM, 143),
        (["mode=ddp", "nproc=2"], signal.SIGINT, 130),
        pytest.param(["mode=single"], signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(["mode=ddp", "nproc=2"], signal.SIGTERM, 143, marks=pytest.mark.full),
    ],
    ids=["single SIGTERM", "ddp SIGINT", "single SIGINT", "ddp SIGTERM"],
)
def test_a_signal_saves_and_leaves(number, code, mode, tmp_path):
    folder = tmp_path / "run"
    with started(
        "recipe=digits", "epochs=2000", *mode, f"output={folder}", stderr=subprocess.PIPE
    ) as process:
        wait_for(lambda: (folder / "steps.csv").exists() and len(steps(folder)) > 30, process)
        process.send_signal(number)
        _, message = process.communicate(timeout=20)
    assert process.returncode == code, message
    assert f"output={folder} resume=auto" in message and "Traceback" not in message
    run_result = result(folder)
    assert run_result["status"] == "preempted" and run_result["exit_code"] == code
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())
    assert saved == run_result["steps"] > 30


# ---------------------------------------------------------------------------------------------
# launchers


def two_nodes(*words, folders, env=None):
    """Two torchruns of the user, each in a folder of its own, the first with rank 0."""
    both = [
        "--nnodes=2",
        "--nproc_per_node=1",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    ]
    with ExitStack() as closing:
        nodes = []
        for rank, folder in enumerate(folders):
            node = torchrun(*words, arguments=[*both, f"--node_rank={rank}"], cwd=folder, env=env)
            nodes.append(closing.enter_context(node))
        messages = [node.communicate(timeout=120)[0] for node in nodes]
        return [(node.returncode, out) for node, out in zip(nodes, messages, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["mode=ddp", "mode=pipeline pipeline.microbatches=2"])
def test_a_node_without_the_run_folder_gets_the_checkpoint(mode, reference, tmp_path):
    """Each node has its own disk, and only the first has the saved files."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    words = [
        *SAME,
        *mode.split(),
        "model.name=cnn_gn",
        "ema=0.9",
        "output=runs/mine",
        "save.every_steps=2",
    ]
    ended = two_nodes(*words, folders=folders, env={"TRAINER_FAULT": "kill@1:10"})
    assert all(code for code, _ in ended)
    assert (folders[0] / "runs").exists()
    assert not (folders[1] / "runs").exists()
    turned = two_nodes(*words, "resume=auto", folders=folders[::-1])
    assert all(code for code, _ in turned), turned
    assert any(re.search(r"rank 1 .*\bruns/mine .*rank 0 ", out) for _, out in turned), turned
    ended = two_nodes(*words, "resume=auto", folders=folders)
    assert [code for code, _ in ended] == [0, 0] and re.search(
        r"resuming\D+\d+\D+\d+", ended[0][1]
    ), ended
    assert losses(folders[0] / "runs/mine") == pytest.approx(losses(reference), rel=1e-4)


@pytest.mark.slow
def test_restarts_resume_by_themselves(tmp_path):
    arguments = [
        "--standalone",
        "--nproc_per_node=2",
        "--max-restarts=1",
        f"--log-dir={tmp_path / 'logs'}",
    ]
    words = [
        "recipe=digits",
        "model.name=cnn_gn",
        "epochs=1",
        "save.every_steps=4",
        f"output={tmp_path / 'run'}",
    ]
    with torchrun(
        *words, *QUIET, arguments=arguments, env={"TRAINER_FAULT": "kill@1:10"}
    ) as process:
        out, _ = process.communicate(timeout=120)
    out += "".join(
        f"\n{path}: {path.read_text()}" for path in sorted((tmp_path / "logs").rglob("error.json"))
    )
    assert process.returncode == 0, out
    assert re.search(r"resuming\D+8\D+14\b", out), out
    assert len(steps(tmp_path / "run")) == 14, out

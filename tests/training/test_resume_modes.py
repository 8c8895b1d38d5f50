"""Checkpoints that one mode writes and another continues, and how runs of several stages or workers
end.
"""

from __future__ import annotations

import math
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.command_line import QUIET, WHOLE, losses, ok, result, steps, trainer
from tests.training.whole_runs import APART, EPOCH, MODES, assert_ends_like, kill, newest
from trainer.telemetry.events import read_curves

# ------------------------------------------------------------------------------------- from mode to
# mode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The epoch in mode=single, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ok(*EPOCH, *MODES["single"], f"output={folder}")
    return folder


@pytest.mark.slow
def test_a_run_goes_round_all_modes(whole, tmp_path):
    """Killed again and again, and continued in another mode each time: one run all the same."""
    run = tmp_path / "run"
    ring = ["single", "1f1b", "split", "ddp", "streams"]
    words = [*EPOCH, "save.every_steps=4", "resume=auto", f"output={run}"]
    for turn, mode in enumerate(ring[:-1], 1):
        kill(4 * turn + 2, *words, *MODES[mode])
        assert newest(run) == 4 * turn
    completed = ok(*words, *MODES[ring[-1]])
    assert re.search(r"resuming\D+16\D+22\b", completed.stdout)
    assert_ends_like(run, whole)


@pytest.mark.parametrize("was", MODES)
@pytest.mark.full("ten runs for each of nine modes")
def test_every_mode_continues_every_other(was, whole, tmp_path):
    words = [*EPOCH, "save.every_steps=5"]
    kill(12, *words, *MODES[was], f"output={tmp_path / 'killed'}")
    assert newest(tmp_path / "killed") == 10
    for now in MODES:
        run = tmp_path / now
        shutil.copytree(tmp_path / "killed", run)
        completed = ok(*words, *MODES[now], f"output={run}", "resume=auto")
        assert re.search(r"resuming\D+10\D+2\d\b", completed.stdout)
        if was in APART or now in APART:
            run_result = result(run)
            assert run_result["status"] == "completed" and run_result["data"]["val_samples"] == 360
            assert (
                run_result["steps"] in range(21, 25) and len(steps(run)) == run_result["steps"]
            ), (
                was,
                now,
                run_result["steps"],
            )
            assert all(map(math.isfinite, [*losses(run), run_result["val_loss"]]))
        else:
            assert_ends_like(run, whole)


UNEVEN = [
    "recipe=digits",
    "schedule.warmup_epochs=0",
    "epochs=1",
    "max_steps=12",
    "save.every_steps=5",
    "timeout=60",
]
UNEVEN += [*WHOLE, "logging.verdict=false"]
SIZES = {
    # 11 pairs on each of three ranks, in 4 + 4 + 3; 17 and 16 on two
    "ddp": "cnn_gn optimizer.lr=0.05 batch_size=66 accumulate=3 augment.mixup=0.2 "
    "loss.label_smoothing=0.1 "
    "clip_grad_norm=0.5",
    # 12 + 12 + 11 of the first 35 images, and of the others; then 18 + 17
    "ddp sync_bn=true": "cnn optimizer.lr=0.001 batch_size=70 accumulate=2",
    "fsdp": "cnn_gn optimizer.lr=0.05 batch_size=65 ema=0.9",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.full] * (mode != "ddp")) for mode in SIZES]
)
def test_a_rank_is_lost_where_the_batch_does_not_divide(mode, tmp_path):
    """Shards of unequal sizes add up to the gradient of the whole batch."""
    words = [*UNEVEN, *f"model.name={SIZES[mode]}".split()]
    ranks = f"mode={mode}".split()
    one = tmp_path / "single"
    run = tmp_path / "run"
    ok(*words, "mode=single", f"output={one}")
    kill(8, *words, *ranks, "nproc=3", f"output={run}", rank=1)
    assert newest(run) == 5
    ok(*words, *ranks, "nproc=2", f"output={run}", "resume=auto")
    assert_ends_like(run, one)
    assert losses(run) == pytest.approx(losses(one), rel=2e-5)
    norms = [read_curves(folder)["train/grad_norm"][2] for folder in (one, run)]
    assert len(norms[0]) == 12
    assert norms[1] == pytest.approx(norms[0], rel=2e-4)


# --------------------------------------------------------------------------------------------------
# bad endings


def running(folder):
    """Processes with the run's folder in their command line."""
    collected = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # The process has ended.
            collected += [path.parent.name] * (str(folder).encode() in path.read_bytes())
    return collected


FAULTS = {
    "kill@1:3": (7, "rank 1 was killed by SIGKILL"),
    "hang@1:3": (7, "lost another rank"),
    "oom@1:3": (6, "out of memory on cpu:1, which has "),
    "nan@0:3": (5, "not finite"),
}
SAMPLE = {
    ("kill@1:3", "ddp"): [],
    ("kill@1:3", "1f1b"): [],
    ("hang@1:3", "ddp"): [pytest.mark.slow],
}


@pytest.mark.slow(cases=["kill@1:3-1f1b"])
@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param(fault, mode, marks=SAMPLE.get((fault, mode), [pytest.mark.full("a sample")]))
        for fault in FAULTS
        for mode in ("ddp", "1f1b", "zbv 2x2", "local_sgd")
    ],
)
def test_a_failing_rank_ends_all_with_its_own_code(fault, mode, tmp_path):
    words = [
        "recipe=digits",
        "batch_size=64",
        *MODES[mode],
        "timeout=10",
        *QUIET,
        f"output={tmp_path / 'run'}",
    ]
    completed = trainer(*words, env={"TRAINER_FAULT": fault}, timeout=90)
    code, says = FAULTS[fault]
    assert completed.returncode == code, completed.stderr
    lines = completed.stderr.splitlines()
    assert says in lines[-1] and lines[-1].startswith("trainer: error: ")
    # Each rank prints where it waited, and the one that hung prints where it is.
    if fault.startswith("hang"):
        shown = {
            path.name: path.read_text() for path in (tmp_path / "run").glob("stacks-rank*.txt")
        }
        assert len(shown) == result(tmp_path / "run")["world_size"]
        assert "faults.py" in shown["stacks-rank1.txt"]
    else:
        assert len(lines) == 1, completed.stderr
    assert running(tmp_path) == []


WATCHED = """
import os
from torch import nn
from trainer import register_model

def note(layer, inputs):
    if inputs[0].device.type != "meta" and layer.training:  # no trial of the shape
        with open(f"rank{os.environ['RANK']}.txt", "a") as file:
            print(layer.weight.double().sum().item(), float(inputs[0].isfinite().all()), file=file)

@register_model("watched")
def build(num_classes, channels, image_size):
    layers = [nn.Flatten(), nn.Linear(channels * image_size ** 2, 8), nn.Tanh(),
        nn.Linear(8, num_classes)]
    for layer in layers[1::2]:
        layer.register_forward_pre_hook(note)
    return nn.Sequential(*layers)
"""


@pytest.mark.slow
def test_not_finite_in_one_stage_updates_none_and_saves_nothing(tmp_path):
    """Ranks record their weights at every forward pass: they stay the same from the poisoned batch
    on.
    """
    (tmp_path / "watched.py").write_text(WATCHED)
    words = [
        "recipe=digits",
        "plugin=watched",
        "model.name=watched",
        "batch_size=64",
        *MODES["1f1b"],
        "pipeline.cuts=['2']",
        "save.every_steps=4",
        "logging.every_steps=100",
        "logging.progress=false",
    ]
    completed = trainer(
        *words, f"output={tmp_path / 'run'}", cwd=tmp_path, env={"TRAINER_FAULT": "nan@0:6"}
    )
    assert completed.returncode == 5 and len(completed.stderr.splitlines()) == 1, completed.stderr
    assert newest(tmp_path / "run") == 4 and not (tmp_path / "run" / "last.safetensors").exists()
    assert result(tmp_path / "run")["status"] == "failed"
    for rank in (0, 1):
        seen = [line.split() for line in (tmp_path / f"rank{rank}.txt").read_text().splitlines()]
        poisoned = next(number for number, (_, finite) in enumerate(seen) if finite == "0.0")
        weights = [weight for weight, _ in seen]
        assert len(set(weights[:poisoned])) >= 5, (
            "five steps before it, each with weights of its own"
        )
        assert set(weights[poisoned:]) == {weights[poisoned]} and "nan" not in weights

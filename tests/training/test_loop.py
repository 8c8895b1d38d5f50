"""Evaluations within epochs, and runs that end after a time: training is the same in every mode."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import ok, result, trainer
from tests.modes.ways import EXACT, WORKERS
from trainer.commands.evaluate import evaluate_run
from trainer.saving.weights import read_metadata

SHORT = [
    "recipe=digits",
    "data.name=synthetic",
    "data.samples=320",
    "data.val_samples=50",
    "data.image_size=8",
    "data.channels=1",
    "model.name=cnn_gn",
    "batch_size=64",
    "epochs=2",
    "ema=0.5",
    "logging.verdict=false",
    "logging.every_steps=2",
]
KEPT = ["save.every_steps=1", "save.keep=20"]
EVERY = [*KEPT, "evaluate.every_steps=3"]
# Weights are averaged every 2 steps, so the workers' weights differ at step 3.
MODES = {**EXACT, **WORKERS, "local_sgd": [*WORKERS["local_sgd"], "local_sgd.every=2"]}
FAST = ("ddp", "local_sgd")


def read_last(folder):
    return load_file(folder / "last.safetensors")


def assert_same_files(folder, other):
    """Assert that the weights of two runs are equal to the bit, and the best evaluation too."""
    for name in ("last", "best"):
        one = load_file(folder / f"{name}.safetensors")
        two = load_file(other / f"{name}.safetensors")
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            assert torch.equal(tensor, two[key]), (name, key)
    for key in ("best_top1", "best_epoch", "val_loss", "losses"):
        assert result(folder)[key] == result(other)[key]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    ok(*SHORT, *EVERY, "mode=single", f"output={folder}")
    return folder


def read_evaluations(folder):
    """Return {step: (loss, best value so far)} of the evaluations, from the checkpoints."""
    evaluations = {}
    for path in sorted((folder / "checkpoints").iterdir()):
        manifest = json.loads((path / "manifest.json").read_text())
        history = manifest["facts"]["history"]
        if history["evaluated_step"] == manifest["step"]:
            evaluations[manifest["step"]] = history["validation"]["val_loss"], history["best"]
    return evaluations


@pytest.mark.slow
def test_an_evaluation_within_an_epoch_changes_no_training_and_decides_the_best(single, tmp_path):
    ok(*SHORT, "mode=single", f"output={tmp_path / 'plain'}")
    plain = read_last(tmp_path / "plain")
    for name, tensor in read_last(single).items():
        assert torch.equal(tensor, plain[name]), name
    evaluations = read_evaluations(single)
    assert [*evaluations] == [3, 5, 6, 9, 10]
    for step, (loss, _) in evaluations.items():
        checkpoint = single / "checkpoints" / f"step-{step:08d}"
        assert evaluate_run(checkpoint)["val_loss"] == pytest.approx(loss, rel=1e-6)
    metadata = read_metadata(single / "best.safetensors")
    assert int(metadata["step"]) == min(
        step for step, (_, best) in evaluations.items() if best == result(single)["best_top1"]
    )
    top1 = evaluate_run(single / "best.safetensors")["val_top1"]
    assert top1 == pytest.approx(float(metadata["value"])) == result(single)["best_top1"]


@pytest.mark.full(but=["ddp", "dp", "hogwild"])
@pytest.mark.slow(cases=["local_sgd"])
@pytest.mark.parametrize(
    "mode",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODES],
)
def test_every_mode_evaluates_the_weights_that_it_saves(mode, single, tmp_path):
    folder = tmp_path / "run"
    ok(*SHORT, *MODES[mode], *EVERY, f"output={folder}")
    evaluations = read_evaluations(folder)
    assert [*evaluations] == [3, 5, 6, 9, 10]
    if mode in EXACT:
        for step, (loss, _) in read_evaluations(single).items():
            assert evaluations[step][0] == pytest.approx(loss, rel=1e-4), step
    elif mode != "hogwild":
        ok(*SHORT, *MODES[mode], f"output={tmp_path / 'plain'}")
        plain = read_last(tmp_path / "plain")
        for name, tensor in read_last(folder).items():
            assert torch.equal(tensor, plain[name]), name
    checkpoint = folder / "checkpoints" / "step-00000003"
    assert evaluate_run(checkpoint)["val_loss"] == pytest.approx(evaluations[3][0], rel=1e-4)


@pytest.mark.slow(cases=["kill@0:4-single"])
@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        # Before the evaluation of step 3, between it and the checkpoint of its step, and after it.
        ("kill@0:3", "single"),
        pytest.param("kill@save:rename", "single", marks=pytest.mark.slow),
        ("kill@0:4", "single"),
        pytest.param("kill@0:4", "local_sgd", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_around_an_evaluation_resumes_to_the_bit(fault, mode, single, tmp_path):
    whole = single
    words = [*SHORT, *MODES.get(mode, ["mode=single"]), *EVERY]
    if mode != "single":
        whole = tmp_path / "whole"
        ok(*words, f"output={whole}")
    folder = tmp_path / "run"
    assert trainer(*words, f"output={folder}", env={"TRAINER_FAULT": fault}).returncode
    ok(*words, "resume=auto", f"output={folder}")
    assert_same_files(folder, whole)


@pytest.mark.slow
def test_a_checkpoint_before_its_evaluation_is_evaluated_when_it_is_resumed(single, tmp_path):
    """A signal saves a step before it is evaluated: this checkpoint is one of another recipe."""
    folder = tmp_path / "run"
    words = [*SHORT, "mode=single", "save.every_steps=3", f"output={folder}"]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:5"}).returncode
    completed = ok(*words, "evaluate.every_steps=3", "resume=auto")
    assert "step 3: " in completed.stdout
    assert_same_files(folder, single)


@pytest.mark.slow(cases=["single"])
@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_ends_after_max_time_and_resumes_to_the_bit(mode, tmp_path):
    words = [*SHORT, *MODES.get(mode, ["mode=single"])]
    words[words.index("epochs=2")] = "epochs=60"
    folder = tmp_path / "run"
    completed = ok(*words, "max_time=1s", f"output={folder}")
    stopped = result(folder)
    assert (stopped["status"], stopped["ended_by"]) == ("completed", "max_time")
    steps = stopped["steps"]
    assert 0 < steps < 300
    assert f"step {steps}" in completed.stdout
    assert int(read_metadata(folder / "last.safetensors")["step"]) == steps
    ok(*words, "max_time=1d", "resume=auto", f"output={folder}")
    assert result(folder)["ended_by"] == "epochs"
    ok(*words, f"output={tmp_path / 'whole'}")
    assert_same_files(folder, tmp_path / "whole")


@pytest.mark.parametrize("typed", ["90", "2 h", "0s", "1w", "-1h", "1h30m"])
def test_other_durations_are_refused_by_name(typed):
    completed = trainer(*SHORT, f"max_time={typed}")
    assert completed.returncode == 2
    assert "max_time" in completed.stderr
    assert "30m" in completed.stderr

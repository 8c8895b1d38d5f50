"""A run that is killed and resumed equals the run that was not killed, with every optimizer and
every learning-rate schedule of the tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import QUIET, losses, ok, steps, trainer
from tests.modes.ways import EXACT
from tests.optim.rows import NAMES
from tests.training.whole_runs import kill
from trainer.recipe.optimizer_table import OPTIMIZERS
from trainer.recipe.schedule_table import LR_SCHEDULES

# The cuts are fixed because measured ones may differ between runs.
PIPELINE = [*EXACT["1f1b"], "pipeline.cuts=['2']"]
MODES = {"single": ["mode=single"], "fsdp": EXACT["fsdp"], "1f1b": PIPELINE}
WORDS = [
    "recipe=digits",
    "model.name=mlp",
    "batch_size=64",
    "optimizer.lr=0.002",
    "epochs=2",
    "max_steps=8",
    "save.every_steps=3",
    *QUIET,
]
FAST = ("sgd", "adamw", "adafactor")
SINGLE_FIRST = [
    "single",
    *(pytest.param(mode, marks=pytest.mark.slow) for mode in [*MODES][1:]),
]


def checkpoint(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint: weights, and the state of the optimizer."""
    paths = folder.glob("checkpoints/step-00000008/*.safetensors")
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith("rank-")}


def compare(words: list[str], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    ok(*words, f"output={whole}")
    kill(5, *words, f"output={run}")
    done = ok(*words, f"output={run}", "resume=auto")
    assert "resuming at step 3 of 8" in done.stdout
    assert losses(run) == losses(whole)
    assert [row["lr"] for row in steps(run)] == [row["lr"] for row in steps(whole)]
    assert checkpoint(whole) and checkpoint(run) == checkpoint(whole)


@pytest.mark.full(but=["1f1b-adam", "1f1b-adamw", "fsdp-adafactor", "fsdp-muon", "single-sgd"])
@pytest.mark.slow(cases=["single-adamw", "single-adafactor"])
@pytest.mark.parametrize(
    # One optimizer of each kind is fast: fused, and not fused.
    "name",
    [
        pytest.param(
            param.values[0],
            marks=[*param.marks, *[pytest.mark.slow] * (param.values[0] not in FAST)],
        )
        for param in NAMES
    ],
)
@pytest.mark.parametrize("mode", SINGLE_FIRST)
def test_every_optimizer_resumes_to_the_bit(name, mode, tmp_path):
    words = [*WORDS, *MODES[mode], f"optimizer.name={name}"]
    if mode == "fsdp" and OPTIMIZERS[name].whole and not OPTIMIZERS[name].gathers:
        assert trainer(*words, f"output={tmp_path / 'run'}").returncode == 2
        return
    compare(words, tmp_path)


@pytest.mark.full(cases=["cosine", "polynomial", "plateau"])
@pytest.mark.slow(cases=["step", "exponential", "cosine", "constant", "plateau"])
@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_every_schedule_resumes_to_the_bit(name, tmp_path):
    # An epoch has three or four steps, and there is no warm-up: the rates are the schedule's.
    words = [word for word in WORDS if not word.startswith(("batch_size=", "epochs="))]
    words += ["batch_size=360", "epochs=3", "schedule.warmup_epochs=0"]
    if name == "step":
        words.append("schedule.step_epochs=1")
    if name == "plateau":
        # The rate is too low for the metric to improve in every epoch, so that it falls before the
        # run is killed.
        words.remove("optimizer.lr=0.002")
        words += ["optimizer.lr=1e-9", "schedule.patience=1", "batch_size=1000"]
        words.remove("batch_size=360")
        words.remove("epochs=3")
        words.append("epochs=8")
    compare([*words, "mode=single", f"schedule.name={name}"], tmp_path)
    rates = {row["lr"] for row in steps(tmp_path / "run")}
    assert len(rates) > 1 or name == "constant"


@pytest.mark.full(but=["adafactor", "rmsprop"])
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_takes_the_steps_of_single_in_every_mode(name, tmp_path):
    words = [word for word in WORDS if not word.startswith("save.")]
    words += [f"optimizer.name={name}", "optimizer.layer_decay=0.8", "logging.every_steps=1"]
    words.append("optimizer.norm_weight_decay=0")
    ok(*words, "mode=single", f"output={tmp_path / 'single'}")
    expected = losses(tmp_path / "single")
    for number, mode in enumerate(("dp", "ddp", "fsdp", "split", "streams", "1f1b")):
        run = tmp_path / f"run{number}"
        if mode == "fsdp" and OPTIMIZERS[name].whole and not OPTIMIZERS[name].gathers:
            assert trainer(*words, *EXACT[mode], f"output={run}").returncode == 2
            continue
        ok(*words, *EXACT[mode], f"output={run}")
        # Steps of sign and of 1 / sqrt amplify the rounding of sums in another order.
        assert losses(run) == pytest.approx(expected, rel=1e-3)

"""Runs that commit d490a0ff began and left when rank 0 was killed, in `stored`, go on with this
version: of ddp with one rank, and of fsdp, whose checkpoint has the shards of two.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.command_line import ok, result, steps

STORED = Path(__file__).parent / "stored"
# Losses and metrics of the run that was not killed, by that commit.
LOSSES = [2.25888803, 2.10670447]
VAL_LOSS = 2.00201984
VAL_TOP1 = 97 / 360


@pytest.fixture
def stored(tmp_path):
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("ddp", "nproc=1"),
        pytest.param(("fsdp", "nproc=2"), marks=pytest.mark.slow),
        pytest.param(("fsdp", "mode=single"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_stored_run_is_resumed_to_the_end_that_its_own_version_had(words, stored):
    name, *changes = words
    run = stored / name
    said = ok(
        f"recipe={name}", f"output={name}", "resume=auto", "plugin=tiny", *changes, cwd=stored
    ).stdout
    assert re.search(r"resuming\D+8\D+22\b", said)
    assert [int(row["step"]) for row in steps(run)] == [2, 4, 6, 8, 10, 11, 12, 14, 16, 18, 20, 22]
    ended = result(run)
    assert ended["losses"] == pytest.approx(LOSSES, rel=1e-4)
    assert ended["val_loss"] == pytest.approx(VAL_LOSS, rel=1e-4)
    assert ended["val_top1"] == pytest.approx(VAL_TOP1, abs=0.01)


@pytest.mark.slow
def test_stored_weights_are_evaluated_and_predicted_with(stored):
    words = ["plugin=tiny", "data.name=digits"]
    said = ok("evaluate", "checkpoint=last.safetensors", *words, cwd=stored).stdout
    assert f"{VAL_LOSS:.4f}" in said and f"{100 * VAL_TOP1:.2f}%" in said
    said = ok("predict", "last.safetensors", *words, "predict.split=val", cwd=stored).stdout
    assert f"{100 * VAL_TOP1:.2f}%" in said

"""Runs that do not tell a speed, or tell that of something else."""

import pytest

from tests.commands.plan.plans import of_cnn, run_folder
from trainer import plan
from trainer.errors import RecipeError, SetupError


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"step_time_s": None}, 3, "too short"),
        ({"mode": "dp"}, 2, "mode=dp"),
    ],
)
def test_a_run_that_does_not_tell(tmp_path, changes, code, text):
    mode = changes.get("mode", "single")
    folder = run_folder(tmp_path / "run", f"mode={mode}", **changes)
    with pytest.raises((RecipeError, SetupError), match=text) as raised:
        plan(of_cnn("ddp"), nproc=2, measured=folder)
    assert raised.value.code == code


def test_a_run_of_something_else(tmp_path):
    folder = run_folder(tmp_path / "run", "precision=bf16")
    with pytest.raises(RecipeError, match="precision=bf16"):
        plan(of_cnn("ddp"), nproc=2, measured=folder)
    other = run_folder(tmp_path / "other", "data.image_size=64")
    with pytest.raises(RecipeError, match=r"data\.image_size=64"):
        plan(of_cnn("ddp"), nproc=2, measured=other)
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(SetupError, match="cannot be read"):
        plan(of_cnn("ddp"), nproc=2, measured=folder)

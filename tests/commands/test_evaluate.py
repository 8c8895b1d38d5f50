"""A trained run evaluated again: on any number of ranks, from files that tell too little."""

import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.command_line import QUIET, ok, result, torchrun
from trainer.commands.evaluate import evaluate_run
from trainer.errors import CheckpointError, RecipeError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 96 synthetic images, with 37 held out."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    words = ["data.name=synthetic", "data.samples=96", "data.val_samples=37", "data.image_size=8", "model.name=cnn_gn"]
    ok("mode=single", *words, "batch_size=48", "epochs=1", *QUIET, f"output={folder}")
    return folder


@pytest.mark.parametrize("given", [None, 5, {"output": "runs/x"}])
def test_what_is_no_run(given):
    with pytest.raises(RecipeError, match=rf"evaluate\('runs/x'\).*\b{type(given).__name__}$"):
        evaluate_run(given)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_any_number_of_ranks_gives_the_same_figures(trained, ranks):
    arguments = ["--standalone", f"--nproc_per_node={ranks}"]
    with torchrun("evaluate", f"checkpoint={trained}", "batch_size=128", arguments=arguments) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    found = result(trained)
    [line] = [line for line in out.splitlines() if "held-out" in line]
    assert "on 37 held-out images" in line and f"top-1 {found['val_top1']:.2%}" in line
    assert f"val loss {found['val_loss']:.4f}" in line


def test_a_damaged_recipe_is_no_matter_where_its_paths_are_none(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_bytes(bytes(range(256)))
    assert evaluate_run(str(tmp_path / "run"))["val_loss"] == pytest.approx(result(trained)["val_loss"])


def test_other_classes_are_not_those_it_was_trained_on(trained):
    for path in (trained, trained / "checkpoints" / "step-00000002"):
        with pytest.raises(CheckpointError, match=r"\b10 classes \(0, 1, .*, \.\.\.\).*\b7 classes"):
            evaluate_run(str(path), "model.num_classes=7")


@pytest.mark.parametrize("told", ["[", "5", "[" * 9999])
def test_damaged_class_names_are_one_line(trained, tmp_path, told):
    with safe_open(trained / "last.safetensors", "pt") as file:
        facts = file.metadata()
    save_file(load_file(trained / "last.safetensors"), tmp_path / "odd.safetensors", facts | {"classes": told})
    with pytest.raises(CheckpointError, match=r"odd\.safetensors: .*\bclasses\b"):
        evaluate_run(str(tmp_path / "odd.safetensors"))

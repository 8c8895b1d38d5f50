"""`check=true` trains two steps of any run, loads what it saved, and keeps nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainer as api
from tests.command_line import digest, environment, losses, ok, torchrun, trainer
from tests.data.photo_folders import photo_set
from tests.modes import ways
from trainer.errors import CheckpointError, RecipeError
from trainer.saving.run_folder import CHECK
from trainer.training import parts

RUN = ["recipe=digits", "model.name=mlp", "epochs=3", "batch_size=64"]
SHORT = {"mode": "single", "devices": ["cpu"], "model.name": "mlp", "batch_size": 64}
MODES = {"single": ["mode=single"], **ways.EXACT, **ways.WORKERS}


def list_files(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, by its path."""
    files = filter(Path.is_file, folder.rglob("*"))
    return {str(file.relative_to(folder)): digest(file) for file in files}


def read_losses(text: str) -> list[float]:
    """Return the losses of the steps that a check prints."""
    [line] = re.findall(r"^ *trained .*", text, re.M)
    return [float(number) for number in re.findall(r"\d+\.\d{4}", line)]


def test_a_check_has_the_losses_of_the_run_and_leaves_an_earlier_run_alone(tmp_path: Path) -> None:
    words = [*RUN, "mode=single", "ema=0.9", "accumulate=2", "augment.mixup=0.2", "save.top_k=1"]
    words += ["save.every_steps=500", "evaluate.every_steps=500", "logging.every_steps=1"]
    output = f"output={tmp_path / 'run'}"
    ok(*words, output, "max_steps=3", "logging.progress=false")
    before = list_files(tmp_path)
    for changes in ([], ["resume=auto"], ["resume=auto", "optimizer.lr=0.5"]):
        printed = ok(*words, output, *changes, "check=true").stdout
        assert list_files(tmp_path) == before
        assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    first = losses(tmp_path / "run")[0]
    assert read_losses(printed)[0] == pytest.approx(first, abs=1e-4)
    printed = ok(*words, "check=true", cwd=tmp_path).stdout
    expected = losses(tmp_path / "run")[:2]
    assert read_losses(printed) == pytest.approx(expected, abs=1e-4)
    assert list_files(tmp_path) == before


@pytest.mark.full(but=["ddp", "hogwild", "local_sgd", "streams"])
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_checked(mode: str, tmp_path: Path) -> None:
    words = [
        *ways.SMALL,
        *ways.SHALLOW,
        *ways.TWICE,
        *MODES[mode],
        "check=true",
    ]
    if "nproc=4" not in words:
        words += ["optimizer.name=adamw", "optimizer.lr=0.001"]
    printed = ok(*[word for word in words if word != "optimizer.lr=0.01"], cwd=tmp_path).stdout
    assert len(read_losses(printed)) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    words = [*RUN, "mode=ddp", "check=true", "output=deep/run"]
    arguments = ["--standalone", "--nproc_per_node=2"]
    with torchrun(*words, arguments=arguments, cwd=tmp_path) as process:
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert len(read_losses(printed)) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_photos_are_named_and_no_cache_is_built(tmp_path: Path) -> None:
    photo_set(tmp_path / "photos", {"cat": 12, "dog": 12}, split=True)
    words = ["recipe=finetune", f"data.root={tmp_path / 'photos'}", "model.name=cnn"]
    words += ["model.weights=null", "data.image_size=32", "mode=single", "batch_size=8"]
    words += ["data.cache=disk", f"data.cache_dir={tmp_path / 'cache'}", "check=true"]
    before = list_files(tmp_path)
    printed = ok(*words, cwd=tmp_path).stdout
    assert str(tmp_path / "photos" / "train") in printed
    assert list_files(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["check=perhaps"], 2),
        (["check=true", "output=/proc/none"], 3),
        (["check=true", "optimizer.lr=1e30", "optimizer.name=sgd"], 5),
    ],
)
def test_a_check_fails_as_a_run_does(words: list[str], code: int, tmp_path: Path) -> None:
    failed = trainer(*RUN, "mode=single", "logging.progress=false", *words, cwd=tmp_path)
    assert failed.returncode == code, failed.stderr
    assert failed.stderr.startswith("trainer: error: ")
    assert not list(tmp_path.iterdir())


def test_no_logger_receives_anything(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise SystemError('a check imports no logger')")
    path = f"{environment()['PYTHONPATH']}:{tmp_path}"
    words = [*RUN, "mode=single", "logging.wandb=mine", "check=true"]
    assert "warning" not in ok(*words, env={"PYTHONPATH": path}, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "kind",
    [
        parts.Weights,
        pytest.param(parts.OptimizerState, marks=pytest.mark.slow),
        pytest.param(parts.Averages, marks=pytest.mark.slow),
        pytest.param(parts.TrainingPosition, marks=pytest.mark.slow),
        pytest.param(parts.RunHistory, marks=pytest.mark.slow),
        pytest.param(parts.RankState, marks=pytest.mark.slow),
    ],
)
def test_a_part_that_is_not_restored_is_found(
    kind: type[parts.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kind, "restore", lambda self, saved: None)
    with pytest.raises(CheckpointError, match="differs"):
        api.train("digits", **SHORT, ema=0.9, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2])
def test_from_a_program(nproc: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = torch.rand(200, 1, 4, 4)
    data = TensorDataset(
        images,
        (images.mean((1, 2, 3)) > 0.5).long(),
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    before = net[1].weight.clone()
    mode = "single" if nproc is None else "ddp"
    result = api.train(
        model=net, data=(data, data), mode=mode, nproc=nproc, batch_size=20, check=True
    )
    assert (result["status"], result["steps"], result["output"]) == ("completed", 2, None)
    # The first and the last batch of the evaluation.
    assert result["data"]["val_samples"] == 40
    assert torch.equal(net[1].weight, before)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecipeError):
        api.train("digits", check="perhaps")


def test_a_batch_script_may_check(tmp_path: Path) -> None:
    words = ["submit", "slurm", "recipe=digits", "nproc=2", "cpus=2", "time=1:00:00"]
    script = ok(*words, "check=true").stdout
    [launch] = [line for line in script.splitlines() if "-m trainer recipe=digits" in line]
    assert " check=true " in launch


def test_the_folder_is_where_the_run_would_write(tmp_path: Path) -> None:
    from trainer.recipe import load
    from trainer.saving.run_folder import open_check_folder

    (tmp_path / "run").mkdir()
    for output, parent in (("run", "run"), ("new/deep", ".")):
        recipe = load("digits", f"output={tmp_path / output}")
        with open_check_folder(recipe, "true") as folder:
            assert folder and folder.is_dir() and folder.name.startswith(CHECK)
            assert folder.parent == (tmp_path / parent).resolve()
        assert not folder.exists()

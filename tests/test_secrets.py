"""Passwords reach no disk and no screen, and files for others contain no trace of this machine."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from tests.command_line import PROJECT, QUIET, ok, result, trainer
from tests.data.photo_folders import coloured
from trainer.errors import RecipeError, remove_secrets
from trainer.recipe import load, reflection
from trainer.saving.journal import JOURNAL, read_journal

MARK = "hunter2marker"
ADDRESS = f"https://bob:{MARK}@tracker.example/x"
TEXTS = [key for key, kinds in reflection.list_key_types().items() if str in kinds]


def told_in(folder: Path, *marks: str) -> list[str]:
    """Return the files, and members of zip files, below a folder that contain one of the marks."""
    collected = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        contents = {path.name: path.read_bytes()}
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as whole:
                contents |= {f"{path.name}/{name}": whole.read(name) for name in whole.namelist()}
        collected += [
            f"{name}: {mark}"
            for name, data in contents.items()
            for mark in marks
            if mark.encode() in data
        ]
    return collected


@pytest.mark.parametrize("key", [*TEXTS, "recipe", "plugin", "epochs", "mlflow"])
def test_a_password_in_a_word_is_refused_and_shown_nowhere(key: str, tmp_path: Path) -> None:
    words = ["mode=single", f"output={tmp_path / 'run'}", "max_steps=1"]
    completed = trainer(
        *[word for word in words if not word.startswith(f"{key}=")],
        f"{key}={ADDRESS}",
        cwd=tmp_path,
    )
    assert completed.returncode in (2, 3), completed.stderr
    assert MARK not in completed.stdout + completed.stderr
    assert not told_in(tmp_path, MARK)
    if key.startswith("logging."):
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in completed.stderr


@pytest.mark.parametrize(
    "words", [["evaluate", f"checkpoint={ADDRESS}"], ["export", ADDRESS, "format=onnx"]]
)
def test_nor_in_the_words_of_other_commands(words: list[str], tmp_path: Path) -> None:
    completed = trainer(*words, cwd=tmp_path)
    assert completed.returncode and MARK not in completed.stdout + completed.stderr


def test_secrets_are_detected() -> None:
    assert remove_secrets(f"see {ADDRESS} and http://h/?a=1&api_key={MARK}&b=2") == (
        "see https://tracker.example/x and http://h/?a=1&api_key=&b=2"
    )
    for plain in (
        "http://host:5000/a@b",
        "file:///a@b",
        "s3://bucket/x?versionId=1",
        "key=value; me@home.org",
    ):
        assert remove_secrets(plain) == plain
    with pytest.raises(RecipeError) as caught:
        load(None, logging__mlflow=ADDRESS)
    assert MARK not in str(caught.value)


def test_the_environment_s_address_is_stored_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    words = ["recipe=digits", "mode=single", "max_steps=4", "logging.mlflow=true", *QUIET]
    completed = ok(
        *words, env={"MLFLOW_TRACKING_URI": f"http://bob:{MARK}@127.0.0.1:1/"}, cwd=tmp_path
    )
    assert "logging.mlflow lacks" in completed.stdout
    assert MARK not in completed.stdout + completed.stderr and not told_in(tmp_path, MARK)


@pytest.mark.slow
def test_files_for_others_tell_nothing_of_this_machine(tmp_path, tmp_path_factory):
    """The photos and the run folder are below somebody's home directory."""
    home = tmp_path_factory.mktemp("alice")
    run = home / "run"
    for number in range(16):
        coloured(
            home / "photos" / ("ant" if number % 2 else "bee") / f"{number}.png",
            (200 * (number % 2), 50, 90),
        )
    words = [
        "mode=single",
        "data.name=imagefolder",
        f"data.root={home / 'photos'}",
        "data.image_size=16",
    ]
    words += ["batch_size=4", "epochs=1", f"data.cache_dir={home / 'cache'}", *QUIET]
    ok(*words, f"output={run}", cwd=home)
    files = {"exported_program": "a.pt2"}
    files |= (
        {"onnx": "a.onnx"} if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))) else {}
    )
    for kind, name in files.items():
        ok("export", run, f"format={kind}", f"output={tmp_path / name}")
    (tmp_path / "last.safetensors").write_bytes((run / "last.safetensors").read_bytes())
    assert not told_in(
        tmp_path,
        str(run.parent),
        str(PROJECT),
        sys.prefix,
        "site-packages",
        os.path.expanduser("~"),
    )
    with safe_open(tmp_path / "last.safetensors", "pt") as file:
        assert "logging" not in yaml.safe_load(file.metadata()["recipe"])
    ok("evaluate", f"checkpoint={run}")  # The run folder has the path of its photos.
    completed = trainer("evaluate", f"checkpoint={tmp_path / 'last.safetensors'}")
    assert completed.returncode == 3 and "data.root=FOLDER" in completed.stderr
    ok(
        "evaluate",
        f"checkpoint={tmp_path / 'last.safetensors'}",
        f"data.root={run.parent / 'photos'}",
    )
    ok(
        "predict",
        f"checkpoint={tmp_path / 'last.safetensors'}",
        f"data.root={run.parent / 'photos'}",
        cwd=tmp_path,
    )


def test_a_run_that_has_stored_a_password_goes_on_without_it(tmp_path: Path) -> None:
    """Older versions stored passwords."""
    words = ["recipe=digits", "mode=single", "epochs=2", *QUIET, f"output={tmp_path / 'run'}"]
    ok(*words)
    tree = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    tree["logging"]["mlflow"] = ADDRESS
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(tree))
    ok(*words, "resume=auto")
    attempts, _ = read_journal(tmp_path / "run" / JOURNAL)
    assert attempts[-1].resumed == result(tmp_path / "run")["steps"]
    assert MARK not in ok("runs", "show", tmp_path / "run").stdout

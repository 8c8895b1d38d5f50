"""Choosing, claiming and continuing run folders; steps.csv after a resume."""

import os
import random
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from tests.command_line import QUIET, environment, ok, rows, steps, trainer, within
from tests.warm import Popen
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.recipe import load
from trainer.saving import locks
from trainer.saving.files import write_atomically
from trainer.saving.run_folder import RunFolder
from trainer.saving.steps_file import EPOCH_COLUMNS, STEP_COLUMNS, EpochsFile, StepsFile


def recipe(folder, *words):
    return load("digits", f"output={folder}", *words)


def begun(folder, *words):
    """Return a run folder that contains its recipe."""
    run = RunFolder(recipe(folder, *words))
    run.write_recipe(recipe(folder, *words))
    return run


def test_a_fresh_folder_is_named_and_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = RunFolder(load("digits"))
    assert first.path.parts[0] == "runs" and first.path.name.startswith("digits-ddp-2")
    first.close()
    (first.path / ".lock").write_text("another job")
    second = RunFolder(load("digits"))
    assert second.path != first.path
    second.close()


def test_a_used_folder_is_continued_only_on_request(tmp_path):
    begun(tmp_path / "run").close()
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    draft, own = (tmp_path / "run" / f".{name}.{'0' * 32}" for name in ("recipe.yaml", "cache"))
    draft.touch()
    own.mkdir()
    with pytest.raises(FolderInUseError, match="resume=auto"):
        RunFolder(recipe(tmp_path / "run"))
    assert draft.exists() and own.exists()
    with pytest.raises(RecipeError, match=r"batch_size: 96 .*\b32\b"):
        RunFolder(recipe(tmp_path / "run", "resume=auto", "batch_size=32"))
    again = RunFolder(
        recipe(
            tmp_path / "run",
            "resume=auto",
            "mode=single",
            "data.workers=1",
            "logging.every_steps=1",
        )
    )
    assert again.resuming and not draft.exists() and own.exists()
    again.close()


def test_a_restart_of_the_same_job_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.processes.rank.build_job_id", lambda: "job 1")
    begun(tmp_path / "run").close()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    again = RunFolder(recipe(tmp_path / "run"))
    assert again.resuming
    again.close()
    monkeypatch.setattr("trainer.processes.rank.build_job_id", lambda: "job 2")
    (tmp_path / "run" / "last.safetensors").touch()
    with pytest.raises(FolderInUseError):
        RunFolder(recipe(tmp_path / "run"))


@pytest.mark.parametrize("words", [(), ("resume=auto",)])
def test_a_run_that_saved_nothing_makes_way(tmp_path, words):
    first = begun(tmp_path / "run", "optimizer.lr=1")
    first.write_result({"status": "failed"})
    (tmp_path / "run" / "notes.txt").write_text("the user's own")
    (tmp_path / "run" / "checkpoints" / "step-00000001.tmp-1").mkdir(parents=True)
    with pytest.raises(FolderInUseError, match="in use"):  # The other job may still run.
        RunFolder(recipe(tmp_path / "run"))
    first.close()
    again = RunFolder(recipe(tmp_path / "run", *words))
    assert again.replaced and not again.resuming
    assert sorted(path.name for path in again.path.iterdir()) == [
        ".lock",
        "checkpoints",
        "notes.txt",
    ]
    again.write_recipe(recipe(tmp_path / "run"))
    assert load(str(again.path)).optimizer.lr == load("digits").optimizer.lr
    again.close()


@pytest.mark.parametrize(
    "kept", ["checkpoints/step-00000001/", "best.safetensors", "result.json", None]
)
def test_saved_files_of_a_run_are_never_removed(tmp_path, kept):
    if kept is None:  # a recipe of the user's own, in a folder that no run ever had
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.yaml").write_text(recipe("x").to_yaml())
    else:
        begun(tmp_path / "run").close()
        path = tmp_path / "run" / kept
        path.mkdir(parents=True) if kept.endswith("/") else path.write_text(
            '{"status": "completed"}'
        )
    for _ in range(2):  # refusing must not make it ours
        with pytest.raises(FolderInUseError, match="resume=auto"):
            RunFolder(recipe(tmp_path / "run"))
    assert (tmp_path / "run" / "recipe.yaml").exists()


def test_steps_after_the_checkpoint_are_dropped(tmp_path):
    def row(step):
        return dict(zip(STEP_COLUMNS, (step, 0, 1, 0.5, 0.1, 9, 0), strict=True))

    first = StepsFile(tmp_path, 0, pytest.fail)
    for step in (1, 2, 3):
        first.add(row(step))
    first.close()
    with (tmp_path / "steps.csv").open("a") as file:
        file.write("4,0,1")  # killed in mid-row
    second = StepsFile(tmp_path, 2, pytest.fail)
    second.add(row(3))
    second.close()
    assert [row["step"] for row in steps(tmp_path)] == ["1", "2", "3"]


def test_evaluations_after_the_checkpoint_are_dropped(tmp_path):
    """A resumed run may have other metrics, whose columns are added."""

    def row(epoch, **metrics):
        values = dict(zip(EPOCH_COLUMNS, (epoch, 10 * epoch, 0.5, 1.5, 0.1, ""), strict=True))
        return values | {f"val_{name}": value for name, value in metrics.items()}

    path = tmp_path / "epochs.csv"
    first = EpochsFile(tmp_path, 0, pytest.fail)
    for epoch in (1, 2, 3):
        first.add(row(epoch, loss=0.5, top1=float("nan"), **{'a "b", ü/': 7.0}))
        assert len(rows(path)) == epoch, "a row is in the file at once"
    first.close()
    with path.open("a") as file:
        file.write("4,40,0")  # killed in mid-row
    second = EpochsFile(tmp_path, 20, pytest.fail)
    second.add(row(3, loss=0.25, auroc=0.75))
    second.close()
    table = rows(path)
    assert [line["epoch"] for line in table] == ["1", "2", "3"]
    assert [line["val_loss"] for line in table] == ["0.5", "0.5", "0.25"]
    assert [line["val_top1"] for line in table] == ["nan", "nan", ""]
    assert [line["val_auroc"] for line in table] == ["", "", "0.75"]
    assert [line['val_a "b", ü/'] for line in table] == ["7.0", "7.0", ""]
    assert not list(tmp_path.glob(".epochs*"))


ROW = "{},0,1.0,0.5,0.1,9.0,0\n"
SIDE = {
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(3000)),
    "not UTF-8": lambda path: path.write_bytes(path.read_bytes() + b"3,0,1,0.5,\xff\xfe,9\n"),
    "giant field": lambda path: path.write_text(
        path.read_text() + "3,0,1,0.5,0.1," + "9" * 200_000 + "\n"
    ),
    "odd digit": lambda path: path.write_text(path.read_text() + ROW.format("²")),
    "a list": lambda path: path.write_text("[]\n"),
    "nested deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "mine").touch()),
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", SIDE)
def test_a_damaged_steps_file_costs_its_damaged_rows_only(tmp_path, damage):
    path = tmp_path / "steps.csv"
    path.write_text(",".join(STEP_COLUMNS) + "\n" + ROW.format(1) + ROW.format(2))
    appended = damage in ("not UTF-8", "giant field", "odd digit")
    SIDE[damage](path)
    messages = []
    file = StepsFile(tmp_path, 10, messages.append)
    file.add(dict(zip(STEP_COLUMNS, (11, 0, 1, 0.5, 0.1, 9, 0), strict=True)))
    file.close()
    assert [row["step"] for row in steps(tmp_path)] == (["1", "2"] if appended else []) + ["11"]
    assert len(messages) == 1
    assert str(path) in messages[0]
    assert "\n" not in messages[0]
    assert not list(tmp_path.glob(".steps*"))
    assert damage != "a folder" or list(tmp_path.glob("aside-*/mine"))


@pytest.mark.parametrize("damage", SIDE)
def test_a_damaged_epochs_file_costs_its_damaged_rows_only(tmp_path, damage):
    path = tmp_path / "epochs.csv"
    first = EpochsFile(tmp_path, 0, pytest.fail)
    for epoch in (1, 2):
        first.add(dict(zip(EPOCH_COLUMNS, (epoch, epoch, 1, 1, 1, 1), strict=True)))
    first.close()
    SIDE[damage](path)
    messages = []
    file = EpochsFile(tmp_path, 10, messages.append)
    file.add({**dict(zip(EPOCH_COLUMNS, (11, 11, 1, 1, 1, 1), strict=True)), "val_loss": 2.0})
    file.close()
    appended = damage in ("not UTF-8", "giant field", "odd digit")
    assert [row["step"] for row in rows(path)] == (["1", "2"] if appended else []) + ["11"]
    assert len(messages) == 1 and str(path) in messages[0]
    assert damage != "a folder" or list(tmp_path.glob("aside-*/mine"))


@pytest.mark.parametrize("damage", [name for name in SIDE if "UTF" not in name])
def test_damaged_notes_are_left_out_and_replaced(tmp_path, damage):
    folder = RunFolder(recipe(tmp_path / "run"))
    messages = []
    for name in ("tuning.json", "result.json"):
        assert folder.read(name, messages.append) == {} and not messages, "there is none yet"
        path = tmp_path / "run" / name
        path.write_text("{}x")
        SIDE[damage](path)
        assert folder.read(name, messages.append) == {}
        assert len(messages) == (0 if damage == "dangling link" else 1)
        messages.clear()
    folder.write_tuned({"key": 1})
    folder.write_result({"status": "running"})
    assert folder.read("tuning.json", messages.append) == {"key": 1}
    assert folder.read("result.json", messages.append) == {"status": "running"}
    folder.close()


@pytest.mark.parametrize("content", [b"\xff\x00", b"", b"[", b"epochs: many", b"[" * 9999])
def test_a_damaged_recipe_says_what_to_do(tmp_path, content):
    RunFolder(recipe(tmp_path / "run")).close()
    # Else there is nothing to continue.
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"recipe\.yaml.*remove"):
        RunFolder(recipe(tmp_path / "run", "resume=auto"))


def test_replacing_leaves_the_old_text_when_it_fails(tmp_path, monkeypatch):
    target: Path = tmp_path / "result.json"
    write_atomically(target, "old")
    monkeypatch.setattr(
        os,
        "fsync",
        lambda _: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(OSError, match="full"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@contextmanager
def at_work(folder):
    """A run that saves every ten steps and has saved once."""
    words = [
        "recipe=digits",
        "mode=single",
        "model.name=cnn",
        "devices=[cpu]",
        "epochs=4000",
        "save.every_steps=10",
    ]
    words += [*QUIET, "resume=auto", f"output={folder}"]
    run = Popen(
        [sys.executable, "-m", "trainer", *words],
        env=environment(),
        stdout=DEVNULL,
        stderr=PIPE,
        text=True,
    )
    try:
        wait_for_more(folder)
        yield run
    finally:
        run.kill()
        run.wait()


def wait_for_more(folder):
    """Until another checkpoint has been written."""
    last = newest_in(folder)
    assert within(120, lambda: newest_in(folder) != last)


def newest_in(folder):
    return max((path.name for path in folder.glob("checkpoints/step-????????")), default="")


@pytest.mark.slow
def test_a_lock_that_somebody_removed_is_made_again(tmp_path):
    with at_work(tmp_path / "run") as run:
        (tmp_path / "run" / ".lock").unlink()
        wait_for_more(tmp_path / "run")
        wait_for_more(tmp_path / "run")
        assert locks.is_locked(tmp_path / "run")
        run.terminate()
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 143, errors


def changes_in(folder):
    """When each file was changed; what is not written to its end has no name yet."""
    files = [path for path in folder.rglob("[!.]*") if path.is_file() and ".tmp-" not in str(path)]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_a_run_whose_lock_another_one_took_ends_and_writes_nothing(tmp_path):
    folder = tmp_path / "run"
    with at_work(folder) as first:
        first.send_signal(signal.SIGSTOP)
        (folder / ".lock").unlink()
        with at_work(folder) as second:
            second.send_signal(signal.SIGSTOP)
            before = changes_in(folder)
            first.send_signal(signal.SIGCONT)
            _, errors = first.communicate(timeout=60)
            assert (first.returncode, errors.count("\n")) == (8, 1), errors
            assert f"{folder} " in errors and ".lock" in errors
            assert before == changes_in(folder)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_run_whose_folder_is_gone_ends_and_makes_no_other(tmp_path, how):
    folder = tmp_path / "run"
    with at_work(folder) as run:
        run.send_signal(signal.SIGSTOP)
        if how == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "elsewhere")
            folder.mkdir()
        run.send_signal(signal.SIGCONT)
        _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors.count("\n")) == (3, 1), errors
    assert re.search(rf"{folder} .*\bresume=auto\b", errors)
    assert [*folder.rglob("*")] == []


@pytest.mark.slow
def test_a_requeued_job_continues_its_own_folder(tmp_path):
    """The job continues on another node, without resume=auto, below runs/ or in a named folder.

    Another step starts from scratch.
    """
    words = [
        "recipe=d[1].yaml",
        "model.name=mlp",
        "mode=single",
        "max_steps=20",
        "save.every_steps=5",
        *QUIET,
    ]
    (tmp_path / "d[1].yaml").write_text("extends: digits\n")
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    for output in ([], [f"output={tmp_path / 'named'}"]):
        assert trainer(
            *words, *output, cwd=tmp_path, env={**job, "TRAINER_FAULT": "kill@0:12"}
        ).returncode
        again = ok(
            *words,
            *output,
            cwd=tmp_path,
            env={**job, "SLURM_RESTART_COUNT": "1"},
        ).stdout
        assert re.search(r"resuming\D+10\D+20\b", again)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    other = {**job, "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"}
    assert "resuming" not in ok(*words, cwd=tmp_path, env=other).stdout
    assert (
        "resuming"
        not in ok(
            *words,
            "seed=4",
            cwd=tmp_path,
            env={**job, "SLURM_RESTART_COUNT": "1"},
        ).stdout
    )
    assert trainer(*words, f"output={tmp_path / 'named'}", cwd=tmp_path, env=other).returncode == 8


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    for more in ([], ["resume=auto"]):
        with pytest.raises(SetupError, match="output="):
            RunFolder(recipe(tmp_path / ("x" * 300), *more))

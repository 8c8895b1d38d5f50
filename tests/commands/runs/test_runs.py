"""The table of runs for any contents of the folder; runs are removed after the user agrees, all or
none.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys

import pytest

from tests.command_line import QUIET, environment, ok, trainer
from trainer.commands import runs
from trainer.errors import FolderInUseError, RecipeError
from trainer.recipe import load
from trainer.saving import locks
from trainer.saving.steps_file import STEP_COLUMNS
from trainer.telemetry.events import Events

RESULT = {
    "recipe": "digits",
    "mode": "single",
    "status": "completed",
    "error": None,
    "world_size": 1,
    "devices": ["cpu"],
    "precision": "fp32",
    "epochs": 2,
    "steps": 28,
    "data": {"name": "digits", "train_samples": 90},
    "train_loss": 0.5,
    "val_loss": 0.4,
    "val_top1": 0.9,
    "best_top1": 0.95,
    "best_epoch": 1,
    "seconds": 7.0,
    "throughput": {"samples_per_sec": 1234.5},
    "step_time_s": {"mean": 0.02},
    "losses": [1.5, 0.5],
    "peak_memory_bytes": {"cpu": 2_000_000},
    "verdict": {"sentence": "it computes"},
    "versions": {"torch": "2.14"},
}


def make(path, *words, age=0, curve=True, **result):
    """Make a run of `digits` that is `age` seconds old; a result of None means a run that was
    killed in its first epoch.
    """
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(load("digits", "mode=single", *words).to_yaml())
    (path / ".lock").write_text("job")
    (path / "checkpoints" / "step-00000028").mkdir(parents=True)
    (path / "checkpoints" / "step-00000028" / "model.safetensors").write_bytes(b"0" * 1000)
    (path / "last.safetensors").write_bytes(b"0" * 500)
    if result.get("status", "") is not None:
        (path / "result.json").write_text(json.dumps({**RESULT, **result}))
    with (path / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STEP_COLUMNS)
        writer.writerows(
            [step, 0, step / 10, 2 / step, 0.1, 100] for step in range(1, 20 if curve else 2)
        )
    if curve:
        events = Events(path)
        for step in range(5, 20, 5):
            events.scalars({"val/top1": step / 20}, step)
        events.close()
    for file in path.iterdir():
        then = file.stat().st_mtime - age
        os.utime(file, (then, then))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def rows(text):
    """The table's cells, by the run's name."""
    table = text.partition("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in table[1:])}


def test_newest_first_with_what_became_of_each(home):
    make(home / "first", age=7200)
    make(home / "second", "model.name=mlp", age=300, status="preempted", best_top1=None)
    make(home / "third", age=100_000, status="failed", mode="local_sgd", throughput=None)
    make(
        home / "fourth",
        age=60,
        status="running",
        throughput={"samples_per_sec": 151.0, "std": 173.0},
    )
    make(home / "fifth", age=20, status=None)
    make(home / "sixth", status="running")
    lock = locks.lock_folder(home / "sixth", "run")
    table_rows = rows(runs.command([]))
    os.close(lock)
    assert list(table_rows) == ["sixth", "fifth", "fourth", "second", "first", "third"]
    assert [cells[2] for cells in table_rows.values()] == [
        "running",
        "killed",
        "killed",
        "stopped",
        "completed",
        "failed",
    ]
    assert table_rows["first"][:-1] == ["single", "cnn", "completed", "top1 95.00%", "1,234", "2 h"]
    assert table_rows["second"][1] == "mlp"
    assert table_rows["second"][3:6] == ["-", "1,234", "5 min"]
    assert table_rows["third"][0] == "local_sgd" and table_rows["third"][4] == "-"
    assert table_rows["fourth"][4] == "-", "a rate that scatters more than its size is none"
    assert table_rows["fifth"][3:5] == ["-", "-"]


def test_names_are_not_cut_and_other_folders_are_skipped(home):
    long = "digits_interleaved_pipeline-pipeline-20261122-103335-of-many-words"
    make(
        home / long,
        "model.name=regnet_x_16gf",
        mode="local_sgd",
        best_top1=None,
        best_my_very_long_metric=0.123456,
    )
    make(home / "paper" / "seed1")
    (home / "photos" / "cats").mkdir(parents=True)
    # A file of that name alone is no run.
    (home / "photos" / "cats" / "recipe.yaml").write_text("mode: ddp")
    (home / "compare").mkdir()
    (home / "compare" / "compare.json").write_text("{}")
    (home / "notes.txt").write_text("hello")
    (home / "latest").symlink_to(long)
    (home / "dead").symlink_to("nowhere")
    (home / "one").symlink_to("two")
    (home / "two").symlink_to("one")
    text = runs.command([])
    assert set(rows(text)) == {long, "paper/seed1", "latest"}
    assert "my_very_long_metric 0.1235" in text
    assert "\n2 runs, " in text


DAMAGED = {
    "no JSON": ("result.json", b'{"mode": "sin'),
    "deep JSON": ("result.json", b"[" * 100_000),
    "binary": ("result.json", bytes(range(256)) * 10),
    "no YAML": ("recipe.yaml", b"[" * 5000),
    "other YAML": ("recipe.yaml", b"- 1\n- 2\n"),
    "circle": ("recipe.yaml", b"mode: ddp\nmodel: &a {name: *a}\n"),
    "growing YAML": (
        "recipe.yaml",
        b"a0: &a0 x\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
    ),
    "dates": ("recipe.yaml", b"mode: 2026-11-22\nkey: !!set {a, b}\n5: 1.5\n"),
    "keys": ("recipe.yaml", b"? [1, 2]\n: mode\n"),
    "large YAML": ("recipe.yaml", b"#" * 300_000),
    "other types": (
        "result.json",
        json.dumps(
            {
                "mode": 5,
                "status": [1],
                "steps": {},
                "best_top1": True,
                "throughput": 3,
                "devices": 7,
                "losses": "no",
            }
            | {
                "verdict": [],
                "warnings": 3,
                "versions": 1,
                "data": 5,
                "peak_memory_bytes": [],
                "best_epoch": "x",
            }
            | {"recipe": {}}
        ).encode(),
    ),
    "not finite": (
        "result.json",
        b'{"mode": "a", "status": "b", "steps": 1, "best_top1": NaN, "seconds": 1e999}',
    ),
    "steps": ("steps.csv", b"step,epoch\n\x00\xff,,,\n"),
    "events": ("events.out.tfevents.1", b"\x00" * 100),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_never_are_a_traceback(home, kind):
    name, content = DAMAGED[kind]
    make(home / "bad", curve=name != "events.out.tfevents.1")
    make(home / "good")
    (home / "bad" / name).write_bytes(content)
    assert set(rows(runs.command([]))) == {"bad", "good"}
    assert "bad" in runs.command(["show", "bad"])


@pytest.mark.parametrize("name", ["result.json", "recipe.yaml", "steps.csv", ".lock"])
def test_pipes_and_folders_instead_of_files_do_not_block(home, name):
    make(home / "good")
    for kind, put in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        (make(home / kind) / name).unlink()
        put(home / kind / name)
    assert set(rows(runs.command([]))) == {"good", "pipe", "folder"}
    assert all(name in runs.command(["show", name]) for name in ("pipe", "folder"))


def test_names_do_not_move_the_cursor(home):
    make(home / "a\x1b[31m\nb", mode="\x1b[2J")
    for words in ([], ["show", "a\x1b[31m\nb"]):
        text = runs.command(words)
        assert "a?[31m?b" in text and "\x1b" not in text


def test_no_runs_yet(home):
    assert "python -m trainer recipe=digits" in runs.command([])
    home.mkdir()
    assert re.match(r"no runs\b.* runs: .*\brecipe=digits\b", runs.command([]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["zzz"], r"'zzz' .*\bruns/zzz: python -m trainer runs\b"),
        (["show", "digts-1"], r"'digts-1' .* digits-1\?$"),
        (["show"], r"runs show .* NAME; runs\b"),
        (["show", "\0"], "'\0' .*\\bruns/\0: python -m trainer runs\\b"),
        (["show", "x" * 5000], r"'x+' .*\bruns/x+: python -m trainer runs\b"),
        (["show", "runs"], r"runs .*\bfolder\b.*: python -m trainer runs\b"),
        (["show", "digits-1/recipe.yaml"], r"runs/digits-1/recipe\.yaml .*\bfolder\b"),
        (["show", "digits-1", "yes=true"], r"'yes=' .*\bruns show: .* RUN .* RUN$"),
        (["recipe=digits"], r"'recipe=digits' .*\bruns: .* RUN .* RUN$"),
        (["--json"], r"'--json' .*\bruns: .* RUN .* RUN$"),
        (["digits-1", "digits-1"], r"'digits-1 digits-1' .*: .* RUN .* RUN$"),
        (["delete"], r"runs delete .* NAME; runs\b"),
        (["delete", "digits-1", "-f"], r"'-f' .*\bruns delete: .* RUN .* RUN$"),
    ],
)
def test_meaningless_arguments_are_answered_with_a_valid_command(home, words, expected):
    make(home / "digits-1")
    make(home / "other", curve=False)
    with pytest.raises(RecipeError) as error:
        runs.command(words)
    assert re.match(expected, str(error.value)) and "\n" not in str(error.value)


def test_a_run_may_have_the_name_of_a_word(home):
    make(home / "lr=0.1")
    make(home / "-b")
    assert "runs/lr=0.1" in runs.command(["show", "lr=0.1"]) and "runs/-b" in runs.command(["-b"])


def test_torch_is_not_loaded(home, tmp_path):
    make(home / "a")
    make(home / "b", "epochs=3")
    script = (
        "import sys; from trainer.commands import runs; runs.command(['show', "
        "'a']); print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", script]
    assert (
        subprocess.check_output(words, cwd=tmp_path, env=environment(), text=True, timeout=60)
        == "False\n"
    )


def test_the_command_line_on_a_real_run(tmp_path):
    ok(
        "recipe=digits",
        "mode=single",
        "model.name=mlp",
        "max_steps=3",
        *QUIET,
        "output=runs/real",
        cwd=tmp_path,
    )
    assert re.search(r"\nreal +single +mlp +completed +top1 ", ok("runs", cwd=tmp_path).stdout)
    page = ok("runs", "show", "real", cwd=tmp_path).stdout
    assert re.search(r"\n  words +recipe=digits mode=single model.name=mlp max_steps=3", page)
    assert "python -m trainer evaluate runs/real" in page
    bad = trainer("runs", "show", "reel", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert re.fullmatch(r"trainer: error: 'reel' .*\breal\?\n", bad.stderr)


# --- runs delete
# --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal whose user answers."""

    def isatty(self):
        return True


def test_names_paths_and_several(home, tmp_path):
    for name in ("a", "b", "deep/c", "keep"):
        make(home / name)
    text = runs.command(["delete", "a", "runs/b/", str(home / "deep" / "c"), "a", "yes=true"])
    deleted = [line.split(" (")[0] for line in text.splitlines()]
    assert deleted == ["deleted runs/a", "deleted runs/b", f"deleted {home}/deep/c"]
    assert sorted(os.listdir(home)) == ["deep", "keep"]
    assert os.listdir(home / "deep") == []


@pytest.mark.parametrize(
    ("answer", "gone"),
    [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("", False)],
)
def test_delete_asks_the_user(home, monkeypatch, capsys, answer, gone):
    make(home / "a")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    text = runs.command(["delete", "a"])
    assert (home / "a").exists() != gone
    assert text.startswith("deleted runs/a" if gone else "nothing was deleted")
    out = capsys.readouterr().out
    assert "runs/a: completed, top1 95.00%, " in out and "delete 1 run? y/N" in out


def test_nobody_to_ask(home, monkeypatch):
    make(home / "a")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RecipeError, match="yes=true"):
        runs.command(["delete", "a"])
    assert re.fullmatch(r"nothing .*\bdeleted\n", runs.command(["delete", "a", "yes=false"]))
    with pytest.raises(RecipeError, match=r"yes=ja .*true"):
        runs.command(["delete", "a", "yes=ja"])
    assert (home / "a" / "last.safetensors").exists()


def test_a_running_one_is_refused_and_nothing_is_deleted(home):
    make(home / "a")
    make(home / "b")
    lock = locks.lock_folder(home / "b", "run")
    with pytest.raises(FolderInUseError, match="runs/b is running"):
        runs.command(["delete", "a", "b", "yes=true"])
    os.close(lock)
    assert (home / "a").exists() and (home / "b" / "result.json").exists()


def test_all_that_runs_write_is_removed_and_what_no_run_wrote_stays(home):
    """The run folder may have existed before: of files with common names only those of the run are
    removed.
    """
    make(home / "a")
    (home / "a" / "photos").mkdir()
    (home / "a" / "photos" / "best.safetensors").write_text("mine too")
    written = [
        "journal.jsonl",
        "skipped.csv",
        "worst.csv",
        ".worst.csv.0123",
        "slurm-7.log",
        "stacks-rank0.txt",
    ]
    for name in (
        "notes.md",
        "resnet.safetensors",
        "model.safetensors",
        "contact_sheet.png",
        "split.csv",
        *written,
    ):
        (home / "a" / name).write_text("x")
    (home / "a" / ".export-abc").mkdir()  # A killed export leaves this folder.
    text = runs.command(["delete", "a", "yes=true"])
    assert re.fullmatch(r"deleted .*runs/a.*: notes\.md, photos, resnet\.safetensors\n", text)
    assert sorted(os.listdir(home / "a")) == ["notes.md", "photos", "resnet.safetensors"]
    assert os.listdir(home / "a" / "photos") == ["best.safetensors"]


def test_links_lead_nowhere(home, tmp_path):
    make(home / "a")
    disk = tmp_path / "disk"
    (home / "a" / "checkpoints").rename(disk)
    (home / "a" / "checkpoints").symlink_to(disk)
    (home / "latest").symlink_to("a")
    with pytest.raises(RecipeError, match=r"runs/latest .*\blink\b.*/runs/a\b"):
        runs.command(["delete", "latest", "yes=true"])
    runs.command(["delete", "a", "yes=true"])
    assert not (home / "a").exists() and os.listdir(disk) == ["step-00000028"]


@pytest.mark.parametrize("name", [".", "..", "runs", "photos", "table", "file.txt", "/"])
def test_folders_that_are_no_runs_are_not_deleted(home, tmp_path, name):
    (home / "photos").mkdir(parents=True)
    (home / "photos" / "recipe.yaml").write_text("mode: ddp")
    (home / "table").mkdir()
    (home / "table" / "compare.json").write_text("{}")
    (home / "file.txt").write_text("x")
    with pytest.raises(RecipeError):
        runs.command(["delete", name, "yes=true"])
    assert (home / "photos" / "recipe.yaml").exists() and (home / "table" / "compare.json").exists()


def test_the_folder_one_is_in(home, monkeypatch):
    make(home / "a")
    monkeypatch.chdir(home / "a")
    with pytest.raises(RecipeError, match=r"runs/a .*\bcd \.\."):
        runs.command(["delete", ".", "yes=true"])
    assert (home / "a" / "result.json").exists()

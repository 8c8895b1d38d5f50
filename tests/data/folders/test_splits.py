"""An automatic split: stratified, drawn by name and seed, and kept with the run."""

import csv
import shutil

import numpy as np
import pytest

from tests.command_line import QUIET, ok, result, trainer
from tests.data.photo_folders import coloured, names_of, opened, photo_set
from trainer.data.folders.layout import (
    HOLDOUT_FILE,
    NOTHING_BEFORE,
    Before,
    continued,
    draw,
    part_of,
)
from trainer.errors import SetupError
from trainer.processes.rank import build_job_id
from trainer.recipe import load
from trainer.saving.run_folder import RunFolder


@pytest.mark.parametrize(
    ("counts", "share", "held_out"),
    [
        ((10, 5), 0.2, (2, 1)),
        ((1, 2), 0.2, (0, 1)),
        ((3, 3), 0.9, (2, 2)),
        ((100, 4), 0.25, (25, 1)),
    ],
)
def test_each_class_gives_its_share_and_keeps_something(counts, share, held_out):
    labels = np.repeat([0, 1], counts)
    chosen = draw([f"{label}/{n}.jpg" for n, label in enumerate(labels)], labels, share, 0)
    assert tuple(np.bincount(labels[chosen], minlength=2)) == held_out


def test_a_split_depends_on_names_and_seed_only(tmp_path):
    first = {*names_of(opened(photo_set(tmp_path, {"cat": 20, "dog": 20})).val)}
    assert {*names_of(opened(tmp_path).val)} == first != {*names_of(opened(tmp_path, "seed=1").val)}
    photo_set(tmp_path, {"emu": 20})
    assert {name for name in names_of(opened(tmp_path).val) if not name.startswith("emu")} == first
    assert len(opened(tmp_path, "data.val_fraction=0.5").val) == 30


def test_a_table_without_a_split_gets_one(tmp_path):
    photo_set(tmp_path, {"x": 10})
    rows = "".join(f"x/{number}.jpg,{('cat', 'dog')[number % 2]}\n" for number in range(10))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    datasets = opened(tmp_path, "data.labels=labels.csv")
    assert (len(datasets.train), len(datasets.val)) == (8, 2)
    assert sorted(datasets.val.labels.tolist()) == [
        0,
        1,
    ]


def test_validation_images_stay_and_new_images_train(tmp_path):
    photo_set(tmp_path, {"cat": 10, "dog": 10})
    before = Before(frozenset(names_of(opened(tmp_path).val)))
    photo_set(tmp_path, {"cat": 30, "dog": 30})
    again = opened(tmp_path, "seed=5", before=before)
    assert {*names_of(again.val)} == before.held_out and len(again.train) == 56
    with pytest.raises(SetupError, match=r"split\.csv.*\boutput="):
        opened(tmp_path, before=Before(frozenset({"cat/gone.jpg"})))
    other = opened(tmp_path, before=Before(frozenset({"cat/gone.jpg"}), elsewhere=True))
    assert len(other.val) == 60 and other.holdout == f"all of {tmp_path}"


def test_a_restart_of_the_job_keeps_its_split(tmp_path, monkeypatch):
    """The job restarts without resume=auto, before anything was saved."""
    monkeypatch.chdir(tmp_path)
    split = "file,label,split\na/1.jpg,a,val\na/2.jpg,a,train\n"

    def split_of(where, job, *words):
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        (tmp_path / where / HOLDOUT_FILE).write_text(split)
        (tmp_path / where / ".lock").write_text(job)
        folder = RunFolder(load("digits", *words))
        folder.close()
        return continued(folder)

    for words in (["output=run"], ["output=run", "resume=auto"]):
        assert split_of("run", "", *words) == NOTHING_BEFORE
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert split_of("run", build_job_id(), "output=run") == Before(frozenset({"a/1.jpg"}))
    below = "runs/digits-ddp-20260101-000000"
    assert split_of(below, build_job_id()) == Before(frozenset({"a/1.jpg"}))
    assert split_of(below, "another job") == NOTHING_BEFORE


def test_a_run_that_never_began_leaves_no_split_behind(tmp_path):
    """The run ends after the split was written, because its model cannot be built.

    The next run may have another split.
    """
    photos = photo_set(tmp_path / "photos", {"cat": 10, "dog": 10})
    run = tmp_path / "run"
    words = [
        "mode=single",
        "model.name=mlp",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=8",
    ]
    words += ["batch_size=8", "max_steps=1", f"output={run}", *QUIET]
    assert trainer(*words, "model.init_from=nowhere").returncode == 4
    assert "16 training images" in ok(*words, "seed=1").stdout
    assert part_of(run, "val") == {*names_of(opened(photos, "seed=1").val)}


def test_a_damaged_list_is_named(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    assert part_of(tmp_path, "val") is None
    for damage in (b"file\nx\n", b"\xff\xfe\xff", b"file,label\n1,2\n"):
        (tmp_path / HOLDOUT_FILE).write_bytes(damage)
        with pytest.raises(SetupError, match=r"split\.csv .*remove"):
            part_of(tmp_path, "val")


@pytest.mark.slow
def test_a_run_remembers_its_split(tmp_path):
    """A run that is resumed, evaluated or used for prediction has the same validation images, even
    after photos were added.
    """
    photos = tmp_path / "photos"
    run = tmp_path / "run"
    for name, colour in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        for number in range(10):
            coloured(photos / name / f"{number}.jpg", colour, seed=number)
    words = [
        "mode=single",
        "model.name=mlp",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=8",
    ]
    words += ["batch_size=8", "optimizer.lr=0.01", f"output={run}", *QUIET]
    output = ok(*words, "epochs=2").stdout
    assert "16 training images, 4 held out, " in output and "blue 8 + 2, red 8 + 2" in output
    assert result(run)["facts"]["held out"].startswith("0.2 ")
    with (run / HOLDOUT_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = [row["file"] for row in rows if row["split"] == "val"]
    assert len(rows) == 20
    assert [row["label"] for row in rows if row["split"] == "val"] == ["blue"] * 2 + ["red"] * 2
    for number in range(10, 20):
        coloured(photos / "red" / f"{number}.jpg", (200, 0, 0), seed=number)
    assert "4 held-out images" in ok("evaluate", f"checkpoint={run}").stdout
    ok("predict", f"checkpoint={run}", "predict.split=val", f"output={tmp_path / 'predicted'}")
    with (tmp_path / "predicted" / "predictions.csv").open(newline="") as file:
        predicted = list(csv.DictReader(file))
    assert [row["path"] for row in predicted] == [str(photos / name) for name in held_out]
    assert {row["label"] for row in predicted} == {"blue", "red"}
    # The run looks as if it was killed in the second epoch.
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    output = ok(*words, "epochs=2", "resume=auto").stdout
    held_out_by = result(run)["facts"]["held out"]
    assert "26 training images, 4 held out, " in output
    assert held_out_by.startswith("4 of ") and "(split.csv)" in held_out_by

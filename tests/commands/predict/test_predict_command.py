"""Labelling images: every row there, in order, equal to the evaluation; through the real command
line.
"""

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import warm
from tests.command_line import QUIET, environment, ok, result, trainer
from tests.data.photo_folders import coloured, photo
from tests.pages import GUIDE
from trainer.commands.predict import predict_command
from trainer.commands.predict.labelling import Labels
from trainer.commands.predict.predict_command import COLUMNS, Rows, _count_decoders
from trainer.commands.predict.sources import Item
from trainer.errors import TrainerError
from trainer.pool import ItemError
from trainer.processes.resources import count_cores

CPU = "devices=[cpu]"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    ok("recipe=digits_single", "epochs=3", *QUIET, f"output={folder}")
    return folder


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def label(run: Path, output: Path, *words: object, **options: object):
    return ok(
        "predict",
        f"checkpoint={run}",
        f"output={output}",
        "logging.progress=false",
        *words,
        **options,
    )


@pytest.fixture(scope="module")
def labelled(
    digits: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Them, labelled by three workers in batches of eight, and what was printed.

    Not to be changed.
    """
    folder = tmp_path_factory.mktemp("labelled")
    words = [f"data.root={photos}", "devices=[cpu,cpu,cpu]", "predict.batch_size=8"]
    return folder / "out", label(digits, folder / "out", *words).stdout


@pytest.mark.slow
def test_a_split_is_labelled_as_it_was_evaluated(digits, tmp_path):
    completed = label(digits, tmp_path / "out", "devices=[cpu,cpu]")
    rows = read(tmp_path / "out")
    assert [row["path"] for row in rows] == [f"digits/val/{n}" for n in range(360)]
    right = sum(row["class"] == row["label"] for row in rows) / 360
    assert right == pytest.approx(result(digits)["val_top1"])
    assert f"top-1    {right:.2%} of 360 images" in completed.stdout
    first = dict(part.split("=") for part in rows[0]["top5"].split(";"))
    assert len(first) == 5 and rows[0]["class"] == next(iter(first))
    assert (
        float(rows[0]["probability"])
        == float(first[rows[0]["class"]])
        == max(map(float, first.values()))
    )
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "predict.json", "predictions.csv"]
    assert json.loads((tmp_path / "out" / "predict.json").read_text())["images"] == 360


@pytest.mark.parametrize(
    "crop", ["resized", pytest.param("pad", marks=pytest.mark.full("in memory, as all else here"))]
)
def test_large_photos_of_a_folder_are_labelled_as_they_were_evaluated(crop, tmp_path):
    for name, colour in (("cat", (200, 90, 60)), ("dog", (60, 90, 200))):
        for number in range(6):
            photo(tmp_path / "photos" / name / f"{number}.jpg", (400, 300), number)
            coloured(tmp_path / "photos" / name / f"{number + 6}.jpg", colour, (400, 300), number)
    words = [
        f"data.root={tmp_path / 'photos'}",
        "data.image_size=32",
        f"augment.crop={crop}",
        "mode=single",
    ]
    ok(
        "recipe=finetune_small",
        *words,
        "model.name=cnn",
        "epochs=2",
        "batch_size=8",
        *QUIET,
        cwd=tmp_path,
    )
    run = next((tmp_path / "runs").iterdir())
    label(run.name, "val", CPU, cwd=tmp_path)  # a name below runs will do
    completed = label(run, tmp_path / "all", CPU, f"data.root={tmp_path / 'photos'}")
    one = {row["path"]: float(row["probability"]) for row in read(tmp_path / "val")}
    other = {row["path"]: float(row["probability"]) for row in read(tmp_path / "all")}
    assert 0 < len(one) < len(other) == 24
    assert {path: other[path] for path in one} == pytest.approx(one, abs=3e-6)
    assert "24 images labelled\n" in completed.stdout and "\n  top-1" not in completed.stdout
    alone = label(run, tmp_path / "one", CPU, f"data.root={next(iter(one))}").stdout
    assert (
        re.search(r"^predicting 1 image .*\bcpu", alone, re.M) and "\n1 image labelled\n" in alone
    )


def test_the_training_part(digits, tmp_path):
    label(digits, tmp_path / "out", CPU, "predict.split=train", "predict.format=jsonl")
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 1437 and lines[0]["path"] == "digits/train/0"
    assert lines[0]["top5"][0] == [lines[0]["class"], lines[0]["probability"]]


def test_workers_change_nothing_at_a_fixed_batch_size(digits, photos, labelled, tmp_path):
    label(digits, tmp_path / "one", f"data.root={photos}", CPU, "predict.batch_size=8")
    one, three = (
        (folder / "predictions.csv").read_bytes() for folder in (tmp_path / "one", labelled[0])
    )
    assert one == three


def test_bad_images_are_rows_with_reasons(photos, labelled):
    folder, printed = labelled
    rows = read(folder)
    names = [os.path.relpath(row["path"], photos) for row in rows]
    good = [f"{n % 2}/{n:02}.png" for n in (*range(0, 40, 2), *range(1, 40, 2))]
    odd = ("cmyk.jpg", "deep.png", "empty.png", "text.jpg", "truncated.jpg")
    assert names == [*good, *(f"odd/{name}" for name in odd)]
    bad = {os.path.basename(row["path"]): row["error"] for row in rows if row["error"]}
    assert set(bad) == {"empty.png", "text.jpg", "truncated.jpg"}
    assert bad["empty.png"].endswith("empty")
    assert all(bool(row["class"]) != bool(row["error"]) for row in rows)
    assert re.search(r"\n  unread   3\b", printed) and {row["label"] for row in rows} == {""}


def test_a_path_is_that_of_the_file_whatever_its_name_holds(digits, tmp_path):
    names = [
        "new\nline.png",
        "carriage\rreturn.png",
        "both\r\n.png",
        "a,b.png",
        'a"b.png',
        "=1+1.png",
        "-x.png",
    ]
    names += [" blank .png", "tab\t.png", "line\u2028.png", os.fsdecode(b"\xff.png")]
    (tmp_path / "odd").mkdir()
    for name in names:
        Image.new("L", (8, 8)).save(tmp_path / "odd" / name)
    label(digits, tmp_path / "csv", f"data.root={tmp_path / 'odd'}", CPU)
    with (tmp_path / "csv" / "predictions.csv").open(newline="", errors="surrogateescape") as file:
        assert {os.path.basename(row["path"]) for row in csv.DictReader(file)} == set(names)
    label(digits, tmp_path / "json", f"data.root={tmp_path / 'odd'}", CPU, "predict.format=jsonl")
    lines = (tmp_path / "json" / "predictions.jsonl").read_text().split("\n")[:-1]
    assert {os.path.basename(json.loads(line)["path"]) for line in lines} == set(names)


def test_paths_from_stdin(digits, photos, tmp_path):
    chosen = [photos / "1" / "03.png", photos / "nowhere.png", photos / "0" / "02.png"]
    words = ["predict", f"checkpoint={digits}", "data.root=-", CPU, f"output={tmp_path / 'stdin'}"]
    text = "".join(f"{path}\n" for path in chosen).encode()
    command = [sys.executable, "-m", "trainer", *words]
    warm.run(command, input=text, env=environment(), check=True, capture_output=True)
    rows = read(tmp_path / "stdin")
    assert [row["path"] for row in rows] == list(map(str, chosen))
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert os.strerror(errno.ENOENT) in rows[1]["error"]


def test_an_empty_input_and_an_output_folder_within_it_are_refused(digits, photos, tmp_path):
    """Nothing is written."""
    command = [sys.executable, "-m", "trainer", "predict", f"checkpoint={digits}", CPU]
    for argument, words, message in (
        (b"", ["-"], "find photos"),
        (b"\n\n", ["-"], "find photos"),
        (b"", [str(photos), f"output={photos}"], "output="),
    ):
        completed = warm.run(
            [*command, *words],
            input=argument,
            env=environment(),
            capture_output=True,
            cwd=tmp_path,
        )
        assert completed.returncode == 2 and message in completed.stderr.decode()
    assert not [*tmp_path.iterdir()] and not (photos / ".lock").exists()


def test_rows_have_their_name_once_all_else_is_written(tmp_path, monkeypatch):
    """If the disk is full right after the last row, the same command can run again."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(TrainerError, match="full"):
        patch.setattr(predict_command, "write_json", full)
        with Rows(tmp_path, "csv", ("a", "b"), True) as rows:
            rows.finish(1.0)
    assert not any(tmp_path.iterdir())
    (tmp_path / "predict.json").touch()  # A killed command leaves this file.
    predict_command._claim(tmp_path)
    with Rows(tmp_path, "csv", ("a", "b"), True) as rows:
        rows.finish(1.0)
    assert (tmp_path / "predictions.csv").stat().st_size
    assert json.loads((tmp_path / "predict.json").read_text())


def test_a_row_matches_the_guide(tmp_path):
    (tmp_path / "predictions.part").mkdir()  # A folder of that name keeps its contents.
    with Rows(tmp_path, "jsonl", ("a", "b"), True) as rows:
        rows.write(Item("0.png", None, 1), Labels((1, 0), (0.75, 0.25)))
        rows.write(Item("1.png", None, None), Labels((), (), "odd"))
        rows.write(Item("2.png", None, None), ItemError(2, "died"))
        rows.finish(1.0)
    actual = list(map(json.loads, rows.final.read_text().splitlines()))
    assert len([*tmp_path.iterdir()]) == 3
    assert [tuple(row) for row in actual] == [COLUMNS] * 3
    assert actual[0]["top5"] == [["b", 0.75], ["a", 0.25]]
    assert rows.first[0] == (
        "0.png",
        "b 75%  a 25%",
    )
    assert [row["error"] for row in actual] == [None, "odd", "gave up: died"]
    assert rows.counts == {
        "images": 3,
        "unreadable": 1,
        "failed": 1,
        "labelled": 1,
        "right": 1,
    }
    table = (
        (GUIDE / "predict.md")
        .read_text()
        .partition("| column | what it holds |\n")[2]
        .partition("\n\n")[0]
    )
    assert tuple(re.findall(r"^\| `(\w+)` \| \w", table, re.M)) == COLUMNS


def test_outputs_that_are_not_finite_are_no_answers(digits, photos, tmp_path):
    """The weights were damaged by somebody, or the numbers are too large for a short type."""
    with safe_open(digits / "last.safetensors", "pt") as file:
        metadata = file.metadata()
    weights = load_file(digits / "last.safetensors")
    for tensor in weights.values():
        tensor.fill_(float("nan")) if tensor.is_floating_point() else None
    save_file(weights, tmp_path / "odd.safetensors", metadata)
    words = ["predict", f"checkpoint={tmp_path / 'odd.safetensors'}", f"output={tmp_path / 'out'}"]
    words += [f"data.root={photos / '0'}"]
    completed = trainer(*words, "logging.progress=false", CPU)
    assert "20 of 20 images " in completed.stderr and completed.returncode == 9
    rows = read(tmp_path / "out")
    [why] = {row["error"] for row in rows}
    assert "not finite" in why and "precision=fp32" in why
    assert not any(row["class"] or row["probability"] or row["top5"] for row in rows)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, 130), (15, 143))),
    ],
)
def test_a_stopped_command_starts_from_scratch(digits, photos, tmp_path, number, code):
    """A run that is stopped and repeated has the rows of an undisturbed run, none of them twice.

    A kill leaves rows, which a message reports.
    """
    paths = [str(path) for path in sorted(photos.rglob("*.png"))] * 30
    (tmp_path / "list.txt").write_text("\n".join(paths))
    words = [
        "predict",
        f"checkpoint={digits}",
        f"data.root={tmp_path / 'list.txt'}",
        CPU,
        "predict.batch_size=16",
    ]
    label(digits, tmp_path / "whole", *words[2:])
    folder = tmp_path / "out"
    part = folder / "predictions.part"
    command = [sys.executable, "-m", "trainer", *words, f"output={folder}"]
    child = warm.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not part.exists() or part.stat().st_size < 4000:
        assert child.poll() is None, "it was over before it could be stopped"
        time.sleep(0.002)
    child.send_signal(number)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == code and part.exists() == (code == -9)
    assert code == -9 or (errors.count("\n") == 1 and "images again" in errors), errors
    again = label(digits, folder, *words[2:])
    assert bool(re.search(r"stopped.*\bagain\b", again.stdout)) == (code == -9)
    first, second = (
        (tmp_path / name / "predictions.csv").read_bytes() for name in ("whole", "out")
    )
    assert second == first
    assert len(first.splitlines()) == 1 + len(paths)
    assert not part.exists()


def test_a_checkpoint_of_the_run(digits, photos, labelled, tmp_path):
    """Classes and preparation are those in the run folder."""
    arguments = max((digits / "checkpoints").iterdir(), key=lambda path: path.name)
    label(arguments, tmp_path / "out", f"data.root={photos}", CPU, "predict.batch_size=8")
    assert read(tmp_path / "out") == read(labelled[0])


def test_a_folder_that_holds_something_is_refused(digits, photos, labelled):
    """The folder has predictions, of other images or the same ones, or a run; no file is
    overwritten.
    """
    before = (labelled[0] / "predictions.csv").read_bytes()
    words = ["predict", f"checkpoint={digits}", CPU, f"data.root={photos}"]
    for folder, more in ((labelled[0], []), (labelled[0], ["predict.format=jsonl"]), (digits, [])):
        completed = trainer(*words, *more, f"output={folder}")
        assert completed.returncode == 8
        assert "choose another output=" in completed.stderr
        assert completed.stderr.count("\n") == 1
    assert (labelled[0] / "predictions.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["checkpoint=nowhere"], 4, r"'nowhere' .*\bruns/nowhere: "),
        (["model.weights=DEFAULT", "data.root=."], 2, r"model\.weights= .*\brecipe=finetune\b"),
        (["checkpoint=RUN", "compile=true"], 2, r"compile= .*\bCUDA graphs\b"),
        (
            ["checkpoint=RUN", "predict.split=val", "x/y.png"],
            2,
            r"predict\.split=val .*\bor x/y\.png",
        ),
        (["checkpoint=RUN", "data.root=nowhere"], 3, rf"=nowhere .*{os.strerror(errno.ENOENT)}"),
        (["checkpoint=RUN", "data.root=EMPTY"], 3, r"data\.root=.*/empty .*\bno images\b"),
        (["checkpoint=RUN", "devices=[cuda:0]"], 2, r"cuda:0 .*\bdevices=\[cpu\]"),
        (["checkpoint=RUN", "devices=[gpu]"], 2, r"devices: 'gpu' .*\bcuda:0\b"),
        (["checkpoint=RUN", "recipe=digits"], 2, r"recipe= .*\bcheckpoint=RUN\b"),
        (["checkpoint=RUN", "nproc=2"], 2, r"nproc= .*\bdevices=\["),
    ],
)
def test_bad_words(digits, tmp_path, words, code, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y.png").touch()
    (tmp_path / "empty").mkdir()
    places = {
        "checkpoint=RUN": f"checkpoint={digits}",
        "data.root=EMPTY": f"data.root={tmp_path / 'empty'}",
    }
    completed = trainer(
        "predict", *(places.get(word, word) for word in words), f"output={tmp_path / 'out'}"
    )
    assert (completed.returncode, completed.stderr.count("\n")) == (code, 1), completed.stderr
    assert re.search(says, completed.stderr)


def test_several_ranks_are_refused(digits, tmp_path):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    completed = trainer("predict", f"checkpoint={digits}", f"output={tmp_path / 'out'}", env=ranks)
    assert completed.returncode == 2 and re.search(
        r"devices=.*without torchrun", completed.stderr
    ), completed.stderr


@pytest.mark.slow
def test_the_cpu_named_once_is_a_worker_for_each_core(digits, photos, labelled, tmp_path):
    """The batch size changes only the rounding."""
    words = [f"data.root={photos}", CPU]
    named = (
        ", ".join(f"cpu:{core}" for core in range(min(8, count_cores())))
        if count_cores() > 1
        else "cpu"
    )
    assert f"on {named}\n" in label(digits, tmp_path / "out", *words).stdout
    assert "on cpu\n" in label(digits, tmp_path / "threads", *words, "threads=2").stdout
    for rows in zip(
        *(read(folder) for folder in (labelled[0], tmp_path / "out", tmp_path / "threads")),
        strict=True,
    ):
        assert len({(row["path"], row["class"], row["error"]) for row in rows}) == 1
        sure = [float(row["probability"] or 0) for row in rows]
        assert sure[1:] == pytest.approx([sure[0]] * 2, abs=1e-5)
    assert _count_decoders(["cpu"]) == count_cores() // 2
    assert _count_decoders(["cpu"] * count_cores()) == 0
    assert _count_decoders(["cuda:0"]) == min(32, count_cores())
    assert _count_decoders(["cuda:0"] * 2 * count_cores()) == 1


def test_features_are_rows_of_the_images_that_could_be_read(digits, photos, tmp_path):
    """They are the inputs of the last layer: its weights give the probabilities of the table."""
    words = [f"data.root={photos}", "predict.features=true", "predict.batch_size=8"]
    for count in (1, 3):
        devices = ",".join(["cpu"] * count)
        label(digits, tmp_path / str(count), *words, f"devices=[{devices}]")
    rows = read(tmp_path / "3")
    readable = [row for row in rows if not row["error"]]
    assert 0 < len(readable) < len(rows)
    features = np.load(tmp_path / "3" / "features.npy")
    with (tmp_path / "3" / "features.csv").open(newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [row["path"] for row in readable]
    weights = load_file(digits / "last.safetensors")
    (weight,) = (values for values in weights.values() if values.dim() == 2 and len(values) == 10)
    (bias,) = (values for values in weights.values() if values.shape == (10,))
    scores = (torch.from_numpy(features) @ weight.T + bias).softmax(1)
    assert features.dtype == np.float32 and len(features) == len(readable)
    for row, values in zip(readable, scores, strict=True):
        assert row["class"] == str(int(values.argmax()))
        assert float(row["probability"]) == pytest.approx(values.max().item(), rel=1e-3)
    for name in ("features.npy", "features.csv", "predictions.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()

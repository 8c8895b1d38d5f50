"""worst.csv: exchanged labels are found, each under the name of its image, on any number of ranks."""

import csv
import os
import random
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.command_line import QUIET, ok
from trainer.training.evaluation import WORST

COUNT, EXCHANGED = 300, 5
LEARN = ["recipe=digits", "data.name=imagefolder", "batch_size=24", *QUIET]


def read(folder):
    with (folder / WORST).open(newline="") as file:
        return list(csv.DictReader(file))


def predicted(folder):
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def names(rows):
    return [Path(row["path"]).name for row in rows]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """300 handwritten digits in class folders, five of them in the wrong one; and those five."""
    root, data, drawn = tmp_path_factory.mktemp("digits") / "photos", load_digits(), random.Random(1)
    wrong = drawn.sample(range(COUNT), EXCHANGED)
    for place in range(COUNT):
        label = int(data.target[place])
        folder = root / f"digit {(label + drawn.randint(1, 9)) % 10 if place in wrong else label}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (255 / 16 * data.images[place]).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{place}.png")
    return root, {f"{place}.png" for place in wrong}


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = ok(*LEARN, "epochs=15", "mode=single", f"data.root={photos[0]}", f"output={folder}")
    (folder.parent / "said").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_exchanged_labels_are_in_the_first_rows(photos, run, tmp_path):
    """Of the held-out images in the run's own file; of the training images by what predict gives to their labels."""
    said = (run.parent / "said").read_text()
    [line] = [line for line in said.splitlines() if "predict.split=train" in line]
    assert str(run / WORST) in said
    words = shlex.split(line.partition("python -m trainer ")[2])
    ok(*words, f"output={tmp_path / 'train'}", "devices=[cpu,cpu]")
    held, trained = read(run), predicted(tmp_path / "train")
    assert len(held) + len(trained) == COUNT and not set(names(held)) & set(names(trained))
    trained.sort(key=lambda row: float(dict(each.split("=") for each in row["top5"].split(";")).get(row["label"], 0)))
    first = [*names(held)[:3], *names(trained)[:8]]
    assert photos[1] <= set(first), (photos[1], first)
    doubts = [float(row["label_probability"]) for row in held]
    assert doubts == sorted(doubts)
    for rows in (held, trained):
        assert all(os.path.basename(os.path.dirname(row["path"])) == row["label"] for row in rows)
        assert all(Path(row["path"]).is_file() for row in rows)

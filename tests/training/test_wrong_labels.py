"""worst.csv: exchanged labels are found, each under the name of its image, on any number of ranks."""

import random
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.command_line import QUIET, ok, rows
from trainer.training.evaluation import WORST

COUNT, EXCHANGED = 300, 5


def names(found):
    return [Path(row["path"]).name for row in found]


def photos(folder):
    """300 handwritten digits in class folders, five of them in the wrong one; and those five."""
    root, data, drawn = folder / "photos", load_digits(), random.Random(1)
    wrong = drawn.sample(range(COUNT), EXCHANGED)
    for place in range(COUNT):
        label = int(data.target[place])
        named = root / f"digit {(label + drawn.randint(1, 9)) % 10 if place in wrong else label}"
        named.mkdir(parents=True, exist_ok=True)
        pixels = (255 / 16 * data.images[place]).astype(np.uint8)
        Image.fromarray(pixels).save(named / f"{place}.png")
    return root, {f"{place}.png" for place in wrong}


@pytest.mark.slow
def test_exchanged_labels_are_in_the_first_rows(tmp_path):
    """Of the held-out images in the run's own file; of the training images by what predict gives to their labels."""
    (root, wrong), run = photos(tmp_path), tmp_path / "run"
    words = ["recipe=digits", "data.name=imagefolder", f"data.root={root}", "batch_size=24", "epochs=15", *QUIET]
    said = ok(*words, "mode=single", f"output={run}").stdout
    [line] = [line for line in said.splitlines() if "predict.split=train" in line]
    assert str(run / WORST) in said
    words = shlex.split(line.partition("python -m trainer ")[2])
    ok(*words, f"output={tmp_path / 'train'}", "devices=[cpu,cpu]")
    held, trained = rows(run / WORST), rows(tmp_path / "train" / "predictions.csv")
    assert len(held) + len(trained) == COUNT and not set(names(held)) & set(names(trained))
    trained.sort(key=lambda row: float(dict(each.split("=") for each in row["top5"].split(";")).get(row["label"], 0)))
    first = [*names(held)[:3], *names(trained)[:8]]
    assert wrong <= set(first), (wrong, first)
    doubts = [float(row["label_probability"]) for row in held]
    assert doubts == sorted(doubts)
    for row in (*held, *trained):
        assert Path(row["path"]).parent.name == row["label"] and Path(row["path"]).is_file()

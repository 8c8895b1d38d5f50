"""worst.csv: exchanged labels are found, each under the name of its image, on any number
of ranks.
"""

import random
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.command_line import QUIET, ok, rows
from trainer.training.evaluation import WORST

COUNT = 300
EXCHANGED = 5


def names(found):
    return [Path(row["path"]).name for row in found]


def photos(folder):
    """Write 300 handwritten digits to class folders, five of them to the wrong one.

    Return those five.
    """
    root = folder / "photos"
    data = load_digits()
    drawn = random.Random(1)
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
    """Validation images have the labels of the run's own file, and training images the probability
    that predict gives to their labels.
    """
    (root, wrong), run = photos(tmp_path), tmp_path / "run"
    words = [
        "recipe=digits",
        "data.name=imagefolder",
        f"data.root={root}",
        "batch_size=24",
        "epochs=15",
        *QUIET,
    ]
    output = ok(*words, "mode=single", f"output={run}").stdout
    [line] = [line for line in output.splitlines() if "predict.split=train" in line]
    assert str(run / WORST) in output
    words = shlex.split(line.partition("python -m trainer ")[2])
    ok(*words, f"output={tmp_path / 'train'}", "devices=[cpu,cpu]")
    kept = rows(run / WORST)
    trained = rows(tmp_path / "train" / "predictions.csv")
    assert len(kept) + len(trained) == COUNT
    assert not set(names(kept)) & set(names(trained))
    trained.sort(
        key=lambda row: float(
            dict(each.split("=") for each in row["top5"].split(";")).get(row["label"], 0)
        )
    )
    first = [*names(kept)[:3], *names(trained)[:8]]
    assert wrong <= set(first), (wrong, first)
    doubts = [float(row["label_probability"]) for row in kept]
    assert doubts == sorted(doubts)
    for row in (*kept, *trained):
        assert Path(row["path"]).parent.name == row["label"]
        assert Path(row["path"]).is_file()

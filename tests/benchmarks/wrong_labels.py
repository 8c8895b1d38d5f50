"""How many exchanged labels are in the first rows of worst.csv.

    python tests/benchmarks/wrong_labels.py --images FOLDER     # of CIFAR-10: FOLDER/train/CLASS and FOLDER/test/CLASS
    python tests/benchmarks/wrong_labels.py                     # the digits that come with scikit-learn, in seconds

Of the training images a share exchange their labels, in pairs of two classes; the test images keep theirs. A network is
trained on them, `predict.split=train` writes worst.csv, and of its first rows those whose label was exchanged are
counted. By chance a share as large as that of all images would be.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CIFAR = ["recipe=cifar10_fast", "precision=bf16", "data.cache=disk"]
DIGITS = ["recipe=digits_single"]
QUIET = ["logging.tensorboard=false", "logging.verdict=false", "logging.progress=false"]
MARK = "-exchanged"  # ends the names of such images
ROWS = (50, 100, 200, 500, 1000)


def digits(folder: Path) -> Path:
    """scikit-learn's digits as PNG files, a fifth of them to test."""
    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        place = folder / ("test" if number % 5 == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(place / f"{number}.png")
    return folder


def exchanged(images: Path, folder: Path, share: float, seed: int) -> int:
    """Link the images into `folder`, a share of the training labels exchanged in pairs; returns how many are."""
    files = sorted(path for path in (images / "train").rglob("*") if path.is_file())
    order, labels = list(range(len(files))), [path.parent.name for path in files]
    random.Random(seed).shuffle(order)
    wanted, wrong = round(share * len(files)) // 2 * 2, set[int]()
    for one, other in zip(order[::2], order[1::2], strict=False):
        if len(wrong) < wanted and labels[one] != labels[other]:
            labels[one], labels[other] = labels[other], labels[one]
            wrong |= {one, other}
    for number, (path, label) in enumerate(zip(files, labels, strict=True)):
        place = folder / "train" / label / f"{number:06}{MARK * (number in wrong)}{path.suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path.absolute())
    (folder / "val").symlink_to((images / "test").absolute())
    return len(wrong)


def typed(*words: object) -> None:
    """Run the command line."""
    subprocess.run([sys.executable, "-m", "trainer", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="default: scikit-learn's digits")
    parser.add_argument("--share", type=float, default=0.02, help="of the training labels that are exchanged")
    parser.add_argument("--seed", type=int, default=0, help="of what is exchanged")
    parser.add_argument("words", nargs="*", metavar="key=value", help="on top of the recipe, such as epochs=3")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = chosen.images or digits(folder / "digits")
        wrong = exchanged(images, folder / "images", chosen.share, chosen.seed)
        run, recipe = folder / "run", CIFAR if chosen.images else DIGITS
        words = [*QUIET, "data.name=imagefolder", f"data.root={folder / 'images'}", *chosen.words]
        typed(*recipe, *words, f"output={run}")
        typed("predict", run, "predict.split=train", f"output={folder / 'labels'}", "logging.progress=false")
        with (folder / "labels" / "worst.csv").open(newline="") as file:
            found = [Path(row["path"]).stem.endswith(MARK) for row in csv.DictReader(file)]
        accuracy = json.loads((run / "result.json").read_text())["val_top1"]
    print(f"{wrong} labels exchanged; {accuracy:.1%} of the test images right")
    for rows in (rows for rows in ROWS if rows <= len(found)):
        print(f"of the first {rows:>5,} rows: {sum(found[:rows]):>5,} exchanged")


if __name__ == "__main__":
    main()

"""An image is the same image with the same answer in every file format and for every entry point
that reads it.

The inputs are a table: files in folders, nested ones, a label table, tars, Parquet; Pillow images,
arrays and tensors of a user's program, and a registered set. So are the doors: the evaluation of
training, `evaluate`, `predict` as a command, `run.predict`, and an exported network with a
program of its own. What all are held to is computed by that program (`tests/prepare.py`) and
Pillow.
"""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional as vision

import trainer
from tests.command_line import QUIET, ok
from tests.data.archives.making import parquet, tarred
from tests.prepare import prepare
from trainer.commands import export
from trainer.data import registered as registered_sets
from trainer.data.archives import opening as shards_opening
from trainer.data.folders import layout
from trainer.data.photos import decoding
from trainer.errors import SetupError
from trainer.models.small import SMALL

CLASSES = ("Zoo", "ant", "élan")  # Folders sort by code points.
CUT, RESIZED = 48, 96  # sizes of the model's input: images are that high, or are resized first
MEAN = [0.5, 0.4, 0.3]
STD = [0.25, 0.3, 0.35]
# Tolerance of a probability. Pillow and torchvision round the pixels of a JPEG, and of a resized
# image, differently.
LOSSLESS = 1e-5
ROUNDED = 5e-3
WORDS = (
    *(
        "model.name=cnn_gn",
        f"data.mean={MEAN}",
        f"data.std={STD}",
        "mode=single",
        "augment.crop=none",
        "batch_size=3",
    ),
    *("schedule.warmup_epochs=0", "max_steps=1", "threads=1", "data.workers=0", *QUIET),
)
ORIENTATION = 274  # the tag of EXIF


def turned(
    image: Image.Image,
    orientation: int,
) -> tuple[Image.Image, dict[str, Any]]:
    """Return an image as a camera stores it in this orientation, with the tag in its file."""
    undo = {
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        3: Image.Transpose.ROTATE_180,
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return image.transpose(undo), {"exif": exif}


def scene(seed: int) -> Image.Image:
    """Large patches of colour: no two corners are alike."""
    small = np.random.default_rng(seed).integers(
        0,
        256,
        (4, 6, 3),
        dtype=np.uint8,
    )
    return Image.fromarray(small).resize((72, CUT), Image.Resampling.BICUBIC)


def deep(image: Image.Image) -> Image.Image:
    """Gray with 16 bits."""
    return Image.fromarray(np.array(image.convert("L")).astype(np.uint16) * 257)


def transparent(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def palette(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    return image.quantize(16), {"transparency": 3}


KINDS: dict[str, Any] = {
    "upright.png": lambda image: image,
    "side.png": partial(turned, orientation=6),
    "mirrored.png": partial(turned, orientation=5),
    "head.tif": partial(turned, orientation=3),
    "gray.png": lambda image: image.convert("L"),
    "deep.png": deep,
    "deep side.png": lambda image: turned(deep(image), 6),
    "transparent.png": transparent,
    "palette.png": palette,
    "tall.png": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "photo.jpg": lambda image: turned(image, 6),
}


def encoded(kind: str, label: int) -> bytes:
    """A file of this kind that shows class `label`."""
    created = KINDS[kind](scene(100 * label + [*KINDS].index(kind)))
    image, options = created if isinstance(created, tuple) else (created, {})
    file = io.BytesIO()
    image.save(
        file,
        {"jpg": "JPEG", "tif": "TIFF"}.get(kind[-3:], "PNG"),
        **options,
    )
    return file.getvalue()


Truth = dict[tuple[str, str], dict[str, float]]  # Probability of each class, by class and kind.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of each kind in each class, the same for training and held out, and a run on them of
    each size.
    """
    home = tmp_path_factory.mktemp("doors")
    for part in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (home / "photos" / part / name).mkdir(parents=True)
            for kind in KINDS:
                (home / "photos" / part / name / kind).write_bytes(encoded(kind, label))
    for size in (CUT, RESIZED):
        words = [f"data.image_size={size}", "optimizer.lr=0.01", f"output={home}/base-{size}"]
        trainer.train("digits", *WORDS, *folders(home), *words)
    return home


def facts_of(run: Path) -> dict[str, Any]:
    """Return the metadata of weights about their inputs."""
    with safe_open(run / "last.safetensors", "pt") as file:
        metadata = file.metadata()
    keys = ("classes", "channels", "shorter_side", "image_size", "mean", "std")
    return {key: json.loads(metadata[key]) for key in keys}


def by_prepare(network: Any, run: Path, home: Path) -> Truth:
    """Label photos without this package, by `network` from (1, C, H, W) float32 to scores."""
    facts = facts_of(run)
    collected = {}
    assert tuple(facts["classes"]) == CLASSES
    for name, kind, path in photos_of(home, "val"):
        scores = torch.as_tensor(network(prepare(path, facts)))[0]
        collected[name, kind] = dict(zip(CLASSES, scores.softmax(0).tolist(), strict=True))
    return collected


# --- inputs: each function returns the arguments of a run, or its data, and its kinds of images


def photos_of(home: Path, part: str) -> list[tuple[str, str, Path]]:
    return [
        (name, kind, home / "photos" / part / name / kind) for name in CLASSES for kind in KINDS
    ]


def folders(home: Path) -> list[str]:
    return ["data.name=imagefolder", f"data.root={home}/photos"]


def nested(home: Path) -> list[str]:
    for part in ("train", "val"):
        for number, (name, kind, path) in enumerate(photos_of(home, part)):
            below = (
                home
                / "nested"
                / part
                / unicodedata.normalize("NFD", name)
                / CLASSES[number % 3]
                / "deep"
            )
            below.mkdir(parents=True, exist_ok=True)
            (below / kind).write_bytes(path.read_bytes())
    return ["data.name=imagefolder", f"data.root={home}/nested"]


def table(home: Path) -> list[str]:
    with (home / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("file", "label", "split"))
        for part in ("train", "val"):
            for number, (name, _, path) in enumerate(photos_of(home, part)):
                rows.writerow(
                    (
                        path.relative_to(home),
                        unicodedata.normalize(("NFC", "NFD")[number % 2], name),
                        part,
                    )
                )
    return ["data.name=imagefolder", f"data.root={home}", f"data.labels={home}/labels.csv"]


def tar_of_folders(home: Path) -> list[str]:
    nested(home)
    for part in ("train", "val"):
        root = home / "nested" / part
        members = [
            (f"./{path.relative_to(root)}", path.read_bytes()) for path in sorted(root.rglob("*.*"))
        ]
        tarred(home / "tar" / f"{part}.tar", members)
    return ["data.name=shards", f"data.root={home}/tar"]


def webdataset(home: Path) -> list[str]:
    for part in ("train", "val"):
        members = []
        for number, (name, _, path) in enumerate(photos_of(home, part)):
            label = b"%d" % CLASSES.index(name)
            members += [
                (f"{number:04}{path.suffix}", path.read_bytes()),
                (f"{number:04}.cls", label),
            ]
        tarred(home / "wds" / f"x-{part}-0.tar", members)
    (home / "wds" / "classes.txt").write_text("\n".join(CLASSES))
    return ["data.name=shards", f"data.root={home}/wds"]


def parquet_tables(home: Path) -> list[str]:
    for part in ("train", "val"):
        rows = photos_of(home, part)
        images = [path.read_bytes() for _, _, path in rows]
        labels = [CLASSES.index(name) for name, _, _ in rows]
        parquet(home / "parquet" / f"{part}-00000-of-00001.parquet", images, labels, CLASSES)
    return ["data.name=shards", f"data.root={home}/parquet"]


def pillow_items(home: Path) -> Any:
    return tuple(
        ImageFolder(str(home / "photos" / part), loader=Image.open) for part in ("train", "val")
    )


SAME_SHAPE = [kind for kind in KINDS if kind != "tall.png"]


def upright(path: Path) -> np.ndarray[Any, Any]:
    """An image as people put it into an array: turned, on white, with 8 bits."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.array(image) / 257).round().astype(np.uint8))
    image = image.convert("RGBA")
    return np.array(
        Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    )


def stacked(
    home: Path,
    part: str,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = [row for row in photos_of(home, part) if row[1] in SAME_SHAPE]
    return np.stack([upright(path) for _, _, path in rows]), np.array(
        [CLASSES.index(name) for name, _, _ in rows]
    )


def arrays(home: Path) -> Any:
    (train, labels), (val, others) = stacked(home, "train"), stacked(home, "val")
    # OpenCV reads blue, green, red.
    flipped = np.ascontiguousarray(val[..., ::-1])[..., ::-1]
    return (train, labels.astype(np.uint16)), (flipped, others.astype(">i4")), CLASSES


def tensors(home: Path) -> Any:
    parts = (stacked(home, part) for part in ("train", "val"))
    return *(
        (torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)) for x, y in parts
    ), CLASSES


def registered(home: Path) -> list[str]:
    (home / "plugged.py").write_text(
        "from trainer import register_dataset\nfrom tests import test_doors\nfrom pathlib import "
        "Path\nregister_dataset('plugged')(lambda data: "
        "(*test_doors.pillow_items(Path(data.root)), None))\n"
    )
    return ["data.name=plugged", f"data.root={home}"]


FILES = (folders, nested, table, tar_of_folders, webdataset, parquet_tables)
INPUTS = {each.__name__: each for each in (*FILES, pillow_items, arrays, tensors, registered)}


# --- doors
# --------------------------------------------------------------------------------------------------


def by_python(run: Any, home: Path, form: Any) -> Truth:
    """`run.predict` of each held-out photo in this form."""
    photos = photos_of(home, "val")
    message = run.predict([form(path) for _, _, path in photos])
    return {
        (name, kind): dict(zip(each.labels, each.probabilities, strict=True))
        for (name, kind, _), each in zip(photos, message, strict=True)
    }


def by_command(folder: Path, *words: Any) -> list[dict[str, str]]:
    """Return the rows that `predict` writes."""
    ok("predict", *words, f"output={folder}")
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def images_of(
    rows: list[dict[str, str]],
    told: Truth,
) -> list[tuple[str, str]]:
    """Return the class and kind of each photo by its path; photos of a program have the order of
    `ImageFolder`.
    """
    paths = [Path(row["path"]).parts for row in rows]
    if not all("val" in parts for parts in paths):
        return sorted(told)
    return [
        (unicodedata.normalize("NFC", parts[parts.index("val") + 1]), parts[-1]) for parts in paths
    ]


def check_rows(rows: list[dict[str, str]], told: Truth) -> None:
    """Assert that the rows agree for all photos: those of a data set have a class, and those of
    files a path.
    """
    answers = [
        {name: float(p) for name, p in (each.split("=") for each in row["top5"].split(";"))}
        for row in rows
    ]
    if not any(row["label"] for row in rows):
        check(
            dict(zip(images_of(rows, told), answers, strict=True)),
            told,
            LOSSLESS,
        )
        return
    actual = sorted(
        (row["label"], each[row["label"]]) for row, each in zip(rows, answers, strict=True)
    )
    expected = sorted((name, each[name]) for (name, _), each in told.items())
    assert [name for name, _ in actual] == [name for name, _ in expected]
    for (name, one), (_, other) in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, abs=LOSSLESS), name


def check(found: Truth, wanted: Truth, bound: float) -> None:
    """Assert that each image is right, up to the difference of two JPEG decoders."""
    assert found.keys() == wanted.keys()
    for image, message in found.items():
        assert message == pytest.approx(
            wanted[image], abs=ROUNDED if image[1] == "photo.jpg" else bound
        ), image


def check_loss(loss: float, told: Truth, kinds: list[str]) -> None:
    right = [each[name] for (name, kind), each in told.items() if kind in kinds]
    expected = -math.fsum(map(math.log, right)) / len(right)
    assert loss == pytest.approx(expected, abs=ROUNDED if "photo.jpg" in kinds else LOSSLESS)


def check_doors(name: str, size: int, home: Path) -> None:
    """Train on an input, from the fixed weights of the first run, and compare the answers of all
    entry points.
    """
    arguments = INPUTS[name](home)
    words, data = (arguments, None) if isinstance(arguments, list) else ([], arguments)
    kinds = SAME_SHAPE if name in ("arrays", "tensors") else [*KINDS]
    same = [f"model.init_from={home}/base-{size}", "optimizer.lr=1e-12", "optimizer.weight_decay=0"]
    output = home / "runs" / f"{name}-{size}-{len([*home.glob('runs/*')])}"
    words = [*words, *same, f"data.image_size={size}", f"output={output}"]
    plugin = "plugged" if name == "registered" else None
    result = trainer.train("digits", *WORDS, *words, data=data, plugin=plugin)
    run = trainer.load(output)
    message = by_python(run, home, str)
    # Pillow and torch round resized images in ways of their own.
    most = ROUNDED if size == RESIZED else LOSSLESS
    with torch.no_grad():  # A program without this package prepares photos.
        check(
            message,
            by_prepare(lambda x: run.model(torch.from_numpy(x)), output, home),
            most,
        )
    check_loss(result["val_loss"], message, kinds)
    if data is None:
        assert trainer.evaluate(output)["val_loss"] == pytest.approx(result["val_loss"], abs=1e-6)
        words = ["devices=[cpu]", *[f"plugin={plugin}"] * bool(plugin)]
        check_rows(by_command(home / "told" / output.name, output, *words), message)


@pytest.mark.full(
    cases=["folders-48", "table-48", "webdataset-48", "arrays-48", "folders-96", "pillow_items-96"]
)
@pytest.mark.slow(
    cases=["folders-48", "tar_of_folders-48", "webdataset-48", "nested-48", "table-48"]
)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            pytest.param(name, CUT, marks=[pytest.mark.slow] * (name == "registered"))
            for name in INPUTS
        ),
        *(
            pytest.param(name, RESIZED, marks=pytest.mark.slow)
            for name in ("folders", "pillow_items", "arrays")
        ),
    ],
)
def test_training_evaluates_the_image_of_every_entry_point(name, size, home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    check_doors(name, size, home)


def not_turned(image: Any, channels: int, pixel_range: Any = None) -> torch.Tensor:
    return decoding.from_pillow(image, channels, pixel_range)


def on_black(image: Any, channels: int, pixel_range: Any = None) -> torch.Tensor:
    kept = image.convert("RGB") if image.mode in ("RGBA", "P") else image
    return decoding.decode_item(kept, channels, pixel_range)


def squashed(images: torch.Tensor, size: int, *_: object) -> torch.Tensor:
    return vision.resize(images, [size, size], antialias=True)


def innermost(root: Any, paths: Any, *others: Any) -> list[str]:
    return ["".join(path[-1:]) for path in paths]


MUTANTS: dict[str, tuple[str, Any, str, Any]] = {
    "orientation": ("pillow_items", registered_sets, "decode_item", not_turned),
    "transparency": ("pillow_items", registered_sets, "decode_item", on_black),
    "cut": ("arrays", registered_sets, "resize_and_center_crop", squashed),
    "outermost folder": ("tar_of_folders", shards_opening, "_outermost", innermost),
    "Unicode": ("table", layout, "class_name", str),
}


@pytest.mark.slow(cases=["Unicode", "orientation", "transparency"])
@pytest.mark.parametrize("door", MUTANTS)
def test_a_wrong_entry_point_is_detected(door, home, monkeypatch):
    name, room, function, mutant = MUTANTS[door]
    monkeypatch.chdir(home)
    INPUTS[name](home)  # files are written as ever
    monkeypatch.setattr(room, function, mutant)
    with pytest.raises((AssertionError, SetupError)):
        check_doors(name, CUT, home)


@pytest.mark.slow(cases=["96", "48"])
@pytest.mark.parametrize("size", [CUT, RESIZED])
def test_a_program_may_hand_over_an_image_in_any_form(size, home):
    run = trainer.load(home / f"base-{size}")
    paths = by_python(run, home, str)
    for form in (
        Path,
        Image.open,
        upright,
        lambda path: torch.from_numpy(upright(path)).permute(2, 0, 1),
    ):
        check(by_python(run, home, form), paths, LOSSLESS)


@pytest.mark.parametrize("root", ["photos/val", "nested/val", "photos/val/Zoo"])
def test_the_command_labels_folders(root, home):
    if root.startswith("nested"):
        nested(home)
    run = home / f"base-{CUT}"
    message = by_python(trainer.load(run), home, str)
    message = {
        image: each
        for image, each in message.items()
        if not root.endswith("Zoo") or image[0] == "Zoo"
    }
    check_rows(
        by_command(
            home / "told" / root.replace("/", "-"),
            run,
            home / root,
            "devices=[cpu]",
        ),
        message,
    )


@pytest.fixture(scope="module")
def averaged(home: Path) -> tuple[Path, dict[str, Any]]:
    """A run of the network that averages over six views of an image, and its result."""
    words = [word for word in WORDS if not word.startswith("model.name")]
    words += ["model.name=airbench", f"data.image_size={CUT}", f"output={home}/averaged"]
    return home / "averaged", trainer.train("digits", *words, *folders(home), "optimizer.lr=0.01")


def from_six_views(run: Path, sides: int = 2) -> Any:
    """Return the answer for views that are cut and flipped by hand, from a network that averages
    over none.
    """
    network = nn.Sequential(*SMALL["airbench"](len(CLASSES), 3, CUT).children()).eval()
    network.load_state_dict(load_file(run / "last.safetensors"))

    def answer(inputs: np.ndarray[Any, Any]) -> torch.Tensor:
        images = torch.from_numpy(inputs)
        padded = vision.pad(images, [1], padding_mode="reflect")
        views = [images, images, padded[..., :-2, :-2], padded[..., 2:, 2:]]
        flipped = [view.flip(3) for view in views]
        outputs = [network(view) for view in (*views, *flipped)[: sides * 4]]
        return torch.stack(outputs).mean(0).detach()

    return answer


@pytest.mark.slow
def test_a_network_that_averages_over_views_does_so_at_every_entry_point(averaged, home):
    run, result = averaged
    message = by_python(trainer.load(run), home, str)
    check(by_prepare(from_six_views(run), run, home), message, LOSSLESS)
    check_loss(result["val_loss"], message, [*KINDS])
    assert trainer.evaluate(run)["val_loss"] == pytest.approx(result["val_loss"], abs=1e-6)
    check_rows(by_command(home / "told" / "averaged", run, "devices=[cpu]"), message)
    with pytest.raises(AssertionError):
        check(
            by_prepare(from_six_views(run, sides=1), run, home),
            message,
            LOSSLESS,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "exported_program"])
def test_an_exported_network_with_a_program_of_its_own(kind, averaged, home):
    if kind == "onnx" and not all(map(find_spec, export.ONNX)):
        pytest.skip(f"pip install {' '.join(export.ONNX)}")
    views = from_six_views(averaged[0])
    for name, most in {
        f"base-{CUT}": LOSSLESS,
        f"base-{RESIZED}": ROUNDED,
        "averaged": LOSSLESS,
    }.items():
        run = trainer.load(home / name)
        network = exported(
            run.export(kind, home / f"{name}{export.SUFFIXES[kind]}", preprocess=False)
        )
        expected = (
            by_prepare(views, run.path, home) if name == "averaged" else by_python(run, home, str)
        )
        check(by_prepare(network, run.path, home), expected, most)


def exported(file: Path) -> Any:
    """A function from inputs (1, C, H, W) float32 to scores (1, classes)."""
    if file.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(file)
        return lambda inputs: session.run(None, {"input": inputs})[0]
    module = torch.export.load(file).module()
    return lambda inputs: module(torch.from_numpy(inputs)).detach()

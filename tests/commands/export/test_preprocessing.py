"""A file that prepares photos answers as `predict` does for the same files, of any size."""

import json
from dataclasses import fields
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import trainer
from tests.command_line import QUIET, ok
from trainer.cli.grammar import read
from trainer.commands import export
from trainer.commands.export import exporting, preprocessing
from trainer.errors import RecipeError
from trainer.training.trained import Preparation

HAS_ONNX = all(map(find_spec, export.ONNX))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason=f"pip install {' '.join(export.ONNX)}")
FORMATS = [pytest.param("onnx", marks=needs_onnx), "exported_program"]
# Height and width: landscape, portrait, tiny, as large as the resized photo, and as the crop.
SIZES = [(100, 230), (171, 90), (9, 7)]
SIZES += [(82, 82), (72, 72), (300, 400)]
# A network for which each pixel counts, and data sets of two other tasks.
PLUGIN = """
import torch
from torch import nn
from trainer import register_dataset, register_model


@register_model("pixels")
def pixels(num_classes, channels, image_size):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))


def images(targets):
    drawn = torch.randint(0, 256, (len(targets), 3, 12, 12), dtype=torch.uint8)
    return (drawn, targets), (drawn, targets)


@register_dataset("numbers")
def numbers(data):
    return *images(torch.rand(24, 2) * 100), ("left", "right")


@register_dataset("labels")
def labels(data):
    return *images(torch.randint(0, 2, (24, 3)).float()), ("a", "b", "c")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Photos of noise, darker in red than in blue, and runs of few steps on them."""
    home = tmp_path_factory.mktemp("prepared")
    (home / "pixels_to_export.py").write_text(PLUGIN)
    generator = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIZES * 4):
        folder = home / "photos" / "xy"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (height, width, 3)) * (0.4, 0.7, 1.0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    short = ["plugin=pixels_to_export", "model.name=pixels", "mode=single", "max_steps=2", *QUIET]
    photos = ["data.name=imagefolder", "data.root=photos", "data.image_size=72", "batch_size=4"]
    # A trained network of this kind is certain of each class, whatever a photo looks like.
    ok(*short, *photos, "optimizer.lr=0.000001", "output=runs/noise", cwd=home)
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    yield home
    for path in home.glob("x.*"):
        path.unlink()


def open_file(path):
    """Return the file as a function from (N, H, W, C) uint8 to outputs, and its metadata."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        facts = session.get_modelmeta().custom_metadata_map[exporting.METADATA]
        return lambda pixels: session.run(None, {"input": pixels})[0], json.loads(facts)
    extra = {exporting.METADATA: ""}
    module = torch.export.load(path, extra_files=extra).module()
    facts = json.loads(extra[exporting.METADATA])
    return lambda pixels: module(torch.from_numpy(pixels)).detach().numpy(), facts


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_answers_as_predict_for_photos_of_any_size(here, tmp_path, kind, precision):
    target = here / f"x{export.SUFFIXES[kind]}"
    words = [f"format={kind}", f"precision={precision}", f"output={target}"]
    ok("export", "runs/noise", *words, "plugin=pixels_to_export", cwd=here)
    run, facts = open_file(target)
    assert facts["inputs"] == ["uint8", ["height", "width", 3]]
    words = ["predict.format=jsonl", "devices=[cpu]", "plugin=pixels_to_export"]
    ok("predict", "runs/noise", "photos", f"output={tmp_path}/out", *words, cwd=here)
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 4 * len(SIZES)
    for row in map(json.loads, lines):
        pixels = np.asarray(Image.open(row["path"]))
        actual = run(np.stack([pixels, 255 - pixels, pixels]))
        assert actual.dtype == np.float32
        assert facts["classes"][actual[0].argmax()] == row["class"]
        expected = [dict(row["top5"])[name] for name in facts["classes"]]
        np.testing.assert_allclose(actual[[0, 2]], [expected, expected], atol=0.002)
        assert abs(actual[1] - actual[0]).max() > 1e-4
    size = target.stat().st_size
    numbers = 2 * 3 * 72 * 72
    if kind == "exported_program":
        dtype = torch.export.load(target).state_dict["model.1.weight"].dtype
        assert dtype == {"fp32": torch.float32, "fp16": torch.float16}[precision]
    elif precision == "fp16":
        assert 2 * numbers < size < 4 * numbers
    else:
        assert size > 4 * numbers


filter_weights = preprocessing._filter_weights
prepare = preprocessing.DeployedModel._prepare


def without_antialiasing(kernel, count, old, new, size):
    """Weights of a triangle as wide as an old pixel."""
    scale = old.float() / new
    centers = (torch.round((new - size) / 2) + torch.arange(size) + 0.5) * scale
    distances = torch.arange(count) + 0.5 - centers[:, None]
    weights = (1 - distances.abs()).clamp(min=1e-9)
    return weights / weights.sum(1, keepdim=True)


def with_a_box(kernel, count, old, new, size):
    weights = filter_weights(kernel, count, old, new, size)
    weights = (weights > weights.amax(1, keepdim=True) / 2).float()
    return weights / weights.sum(1, keepdim=True)


def one_pixel_off(kernel, count, old, new, size):
    return filter_weights(kernel, count, old, new + 2, size)


def with_blue_first(self, images, preparation):
    return prepare(self, images.flip(3), preparation)


def with_swapped_numbers(self, images, preparation):
    """Mean and standard deviation exchanged: shift = -mean / std, and scale = 1 / (255 * std)."""
    std = 1 / (255 * self.scale)
    mean = -self.shift * std
    pixels = (prepare(self, images, preparation) - self.shift) / self.scale / 255
    return (pixels - std) / mean


FAULTS = [
    (preprocessing, "_filter_weights", without_antialiasing),
    (preprocessing, "_filter_weights", with_a_box),
    (preprocessing, "_filter_weights", one_pixel_off),
    (preprocessing.DeployedModel, "_prepare", with_blue_first),
    (preprocessing.DeployedModel, "_prepare", with_swapped_numbers),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_a_file_with_another_preparation_is_not_written(here, monkeypatch, fault):
    monkeypatch.setattr(*fault)
    words = ["runs/noise", "format=exported_program", "output=x.pt2", "plugin=pixels_to_export"]
    with pytest.raises(RecipeError, match=r"differs from predict .* preprocess=false$"):
        export.command(read(["export", *words])[1])
    assert not (here / "x.pt2").exists()


def test_every_step_of_the_preparation_is_in_the_file():
    """A step that is added to `Preparation` must be added to `DeployedModel`, or refused there."""
    names = {field.name for field in fields(Preparation)}
    assert names == {"image_size", "shorter_side", "channels", "mean", "std", "interpolation"}


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bicubic", "nearest"])
def test_photos_are_resized_as_in_training(here, tmp_path, interpolation):
    """The export itself compares the file with `predict`, and the kernels with each other here."""
    words = ["plugin=pixels_to_export", f"data.interpolation={interpolation}"]
    export.command(
        read(["export", "runs/noise", "format=exported_program", "output=x.pt2", *words])[1]
    )
    run, facts = open_file(here / "x.pt2")
    assert facts["interpolation"] == interpolation
    model = trainer.load("runs/noise", *words[1:])
    for path in sorted((here / "photos").glob("*/*.png"))[:6]:
        pixels = np.asarray(Image.open(path))
        answer = model.predict(str(path))
        given = dict(zip(answer.labels, answer.probabilities, strict=True))
        expected = [given[label] for label in facts["classes"]]
        np.testing.assert_allclose(run(pixels[None])[0], expected, atol=0.002)


@pytest.mark.slow
def test_photos_of_more_than_8_bits_are_refused(here):
    words = ["runs/noise", "format=exported_program", "output=x.pt2", "plugin=pixels_to_export"]
    with pytest.raises(RecipeError, match=r"data\.pixel_range=.* preprocess=false$"):
        export.command(read(["export", *words, "data.pixel_range=[0,4095]"])[1])
    export.command(read(["export", *words, "data.pixel_range=[0,4095]", "preprocess=false"])[1])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [("regression", "numbers"), ("multilabel", "labels")])
def test_values_and_labels_are_those_of_predict(here, task, name):
    words = ["plugin=pixels_to_export", "model.name=pixels", f"data.name={name}", *QUIET]
    words += [
        f"task.name={task}",
        "mode=single",
        "max_steps=3",
        "batch_size=8",
        "optimizer.lr=0.001",
    ]
    ok(*words, f"output=runs/{name}", cwd=here)
    export.command(
        read(["export", f"runs/{name}", "format=exported_program", "output=x.pt2", words[0]])[1]
    )
    run, facts = open_file(here / "x.pt2")
    draw = np.random.default_rng(1)
    photos = draw.integers(0, 256, (5, 40, 30, 3)).astype(np.uint8)
    for answer, actual in zip(
        trainer.load(f"runs/{name}").predict(photos), run(photos), strict=True
    ):
        given = dict(zip(answer.labels, answer.probabilities, strict=True))
        expected = [given[label] for label in facts["classes"]]
        assert actual == pytest.approx(expected, rel=0.01, abs=0.002)

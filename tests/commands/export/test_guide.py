"""Programs of the guide, which use exported files without this package, print what the guide
says.
"""

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import QUIET, ok
from tests.data.photo_folders import KINDS, exif, save_kind, scene
from tests.guide.documents import blocks
from tests.pages import GUIDE
from tests.prepare import prepare
from trainer.cli.grammar import read
from trainer.commands import export
from trainer.commands.export.exporting import quietly
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import prepare_for_evaluation

PAGE = GUIDE / "export.md"
PROGRAMS = {kind: f"with_{kind}.py" for kind in export.SUFFIXES}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of the page, and a run of torchvision's ResNet-18 on photos of two classes, as large
    as those of a camera.
    """
    home = tmp_path_factory.mktemp("guide")
    for block in blocks(PAGE):
        if block.language == "python":
            (home / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
    for name, pixels in (("cat", scene(400, 530)), ("dog", 255 - scene(400, 530))):
        folder = home / "photos" / name
        folder.mkdir(parents=True)
        for number, shift in enumerate(range(0, 90, 15)):
            image = Image.fromarray(np.roll(pixels, shift, 1))
            image.save(folder / f"{number}.jpg", exif=exif((1, 6, 3)[number % 3]))
        image.convert("L").save(folder / "gray.png")
    words = [
        "recipe=finetune",
        "data.root=photos",
        "model.weights=null",
        "data.image_size=80",
        "mode=single",
    ]
    ok(*words, "epochs=2", "batch_size=4", *QUIET, "output=runs/first", cwd=home)
    words = ["checkpoint=runs/first", "data.root=photos", "predict.format=jsonl", "output=labels"]
    ok("predict", *words, "devices=[cpu]", cwd=home)
    return home


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_without_this_package_labels_a_photo(here, kind, monkeypatch, capsys):
    if kind == "onnx" and not all(map(find_spec, export.ONNX)):
        pytest.skip(f"pip install {' '.join(export.ONNX)}")
    assert not re.search(r"(from|import) trainer\b", (here / PROGRAMS[kind]).read_text())
    export.command(read(["export", "first", f"format={kind}"])[1])
    rows = [
        json.loads(line)
        for line in (here / "labels" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 14
    for row in (rows[6], rows[8]):  # a gray one, and one of the other class that is turned
        monkeypatch.setattr(sys, "argv", [PROGRAMS[kind], row["path"]])
        capsys.readouterr()
        with quietly():
            probabilities = runpy.run_path(PROGRAMS[kind])["probabilities"]
        assert capsys.readouterr().out.splitlines()[-1] == row["class"]
        # `predict` decodes the JPEG at half its size.
        nearly = 0.002 if row["path"].endswith(".png") else 0.05
        assert probabilities.max().item() == pytest.approx(row["probability"], abs=nearly)


@pytest.mark.parametrize("name", KINDS)
def test_images_of_every_kind_are_made_ready_as_predict_does(tmp_path: Path, name: str) -> None:
    path = str(save_kind(tmp_path, name))
    for channels, pixel_range in ((1, None), (3, None), (3, (-100, 50_000))):
        if pixel_range and KINDS[name][0].mode != "I;16":
            continue
        facts = {
            "channels": channels,
            "image_size": 64,
            "shorter_side": 73,
            "mean": [0],
            "std": [1],
        }
        actual = (
            255 * prepare(path, facts | ({"pixel_range": pixel_range} if pixel_range else {}))[0]
        )
        expected = prepare_for_evaluation(open_image(path, channels, pixel_range), 64, 73).numpy()
        assert np.abs(actual - expected).max() <= 2.01, (channels, pixel_range)

"""Images that several tests label."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.photo_folders import photo


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures in two class folders, and every kind of bad file."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for n in range(40):
        photo(
            root / str(n % 2) / f"{n:02}.png",
            (14, 12 + n % 5),
            seed=n,
        )
    odd = root / "odd"
    photo(odd / "truncated.jpg", (64, 64))
    os.truncate(odd / "truncated.jpg", 700)
    (odd / "text.jpg").write_text("not a picture")
    (odd / "empty.png").touch()
    Image.fromarray(
        generator.integers(
            0,
            255,
            (20, 20, 4),
            dtype=np.uint8,
        ),
        "CMYK",
    ).save(odd / "cmyk.jpg")
    Image.fromarray(
        generator.integers(
            0,
            65535,
            (20, 20),
            dtype=np.uint16,
        )
    ).save(odd / "deep.png")
    (odd / "notes.md").write_text("no image")
    return root

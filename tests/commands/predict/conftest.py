"""Images that several tests label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures in two class folders, and every kind of bad file."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for n in range(40):
        (root / str(n % 2)).mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (12 + n % 5, 14, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / str(n % 2) / f"{n:02}.png")
    odd = root / "odd"
    odd.mkdir()
    whole = root / "odd" / "truncated.jpg"
    Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    whole.write_bytes(whole.read_bytes()[:700])
    (odd / "text.jpg").write_text("not a picture")
    (odd / "empty.png").touch()
    Image.fromarray(generator.integers(0, 255, (20, 20, 4), dtype=np.uint8), "CMYK").save(odd / "cmyk.jpg")
    Image.fromarray(generator.integers(0, 65535, (20, 20), dtype=np.uint16)).save(odd / "deep.png")
    (odd / "notes.md").write_text("no image")
    return root

"""Pictures: there, see-through, and legible with as many modes as there are. Looked at by people, measured here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from trainer.recipe import MODES
from trainer.telemetry import plots
from trainer.telemetry.plots import Bar

BARS = [Bar(mode, 1000.0 * n, 100.0, f"{1000 * n:,} ± 100,  1.11x  (on CPU cores)") for n, mode in enumerate(MODES, 1)]


@pytest.fixture
def drawn(monkeypatch):
    """The figure behind the picture."""
    figures = []
    save = plots.save_picture

    def keep(figure, path):
        save(figure, path)
        figures.append(figure)

    monkeypatch.setattr(plots, "save_picture", keep)
    return figures


def boxes(figure, texts):
    renderer = figure.canvas.get_renderer()
    return [text.get_window_extent(renderer) for text in texts if text.get_text()]


def apart(found):
    """No two boxes overlap."""
    return not any(a.overlaps(b) for n, a in enumerate(found) for b in found[n + 1 :])


def luminance(colour):
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"])
def test_ink_and_colours_are_seen_on_light_and_dark(ground):
    assert contrast(plots.INK, ground) >= 4.2
    assert all(contrast(colour, ground) >= 1.9 for colour in plots.COLOURS)
    assert len(set(plots.COLOURS)) == len(MODES)


def test_the_ground_is_transparent(tmp_path):
    plots.bars(tmp_path / "p.png", BARS, "images per second")
    image = Image.open(tmp_path / "p.png")
    assert image.mode == "RGBA" and image.getpixel((2, 2))[3] == 0
    assert any(image.getpixel((x, image.height // 2))[3] for x in range(image.width))


@pytest.mark.parametrize(
    "bars", [BARS, [*BARS, *BARS], BARS[:1], [*BARS[:2], Bar("pipeline nproc=2", None, 0, "exit 2")]]
)
def test_bars_have_room_for_their_words(bars, tmp_path, drawn):
    plots.bars(tmp_path / "p.png", bars, "images per second", "digits, global batch 96")
    (figure,) = drawn
    (axes,) = figure.axes
    words = boxes(figure, [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label])
    assert apart(words) and len(words) == 2 * len(bars) + 1
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width + 1 for box in words)
    assert len(axes.patches) == sum(bar.value is not None for bar in bars)


def test_bars_where_nothing_ran(tmp_path):
    plots.bars(tmp_path / "p.png", [Bar("ddp", None, 0, "exit 3")], "images per second")
    assert (tmp_path / "p.png").exists()


def test_it_imports_nothing_of_ours_and_matplotlib_only_when_drawing():
    tree = ast.parse(Path(plots.__file__).read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("trainer")]
    code = "import sys, trainer.telemetry.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

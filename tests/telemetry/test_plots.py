"""Pictures: there, see-through, and legible with as many modes as there are.

Looked at by people, measured here.
"""

from __future__ import annotations

import pytest
from PIL import Image

from trainer.recipe import MODES
from trainer.telemetry import plots

BARS = [
    (mode, 1000.0 * n, 100.0, f"{1000 * n:,} ± 100,  1.11x  (on CPU cores)")
    for n, mode in enumerate(MODES, 1)
]


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


def test_the_ground_is_transparent(tmp_path):
    plots.draw_bars(tmp_path / "p.png", BARS, "images per second", "", {})
    image = Image.open(tmp_path / "p.png")
    assert image.mode == "RGBA" and image.getpixel((2, 2))[3] == 0
    assert any(image.getpixel((x, image.height // 2))[3] for x in range(image.width))


@pytest.mark.parametrize("bars", [BARS, [*BARS, *BARS], BARS[:1], BARS[:2]])
def test_labels_fit_in_bars(bars, tmp_path, drawn):
    marks = {BARS[0][0]: "▲", BARS[-1][0]: "▼"}
    plots.draw_bars(tmp_path / "p.png", bars, "images per second", "digits\nbatch 96", marks)
    (figure,) = drawn
    (axes,) = figure.axes
    words = boxes(
        figure,
        [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label],
    )
    assert apart(words) and len(words) == 2 * len(bars) + 1
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width + 1 for box in words)
    assert len(axes.patches) == len(bars)


def test_bars_have_one_colour_and_claims_are_marked(tmp_path, drawn):
    marks = {BARS[1][0]: "▼"}
    plots.draw_bars(tmp_path / "p.png", BARS, "images per second", "digits", marks)
    (axes,) = drawn[0].axes
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert len({colour[:3] for colour in colours}) == 1
    assert [row for row, colour in enumerate(colours) if colour[3] == 1] == [1]
    assert axes.texts[1].get_text().startswith("▼ ") and "▲" not in axes.texts[0].get_text()

"""Pictures: there, see-through, and legible with as many modes as there are. Looked at by people, measured here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from PIL import Image

from trainer.recipe import MODES
from trainer.telemetry import plots
from trainer.telemetry.plots import Bar, Panel

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


def test_curves_share_a_legend_and_none_hides_another(tmp_path, drawn):
    curve = (list(range(1000)), [3.0 / (1 + n) for n in range(1000)])
    panels = [Panel({mode: curve for mode in MODES}, x, "training loss") for x in ("optimizer steps", "seconds")]
    plots.curves(tmp_path / "p.png", panels, "digits")
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(MODES) and apart(boxes(figure, legend.get_texts()))
    for axes in figure.axes:
        assert all(len(line.get_xdata()) <= plots.SMOOTHEST for line in axes.lines)
        widths = [line.get_linewidth() for line in axes.lines]
        assert len(widths) == len(MODES) and all(a > b for a, b in pairwise(widths)) and widths[0] <= 3
        assert {line.get_linestyle() for line in axes.lines} == {"-"}, "dashes are for what was not measured"
        assert axes.get_xlabel() and axes.get_ylabel()


def test_a_curve_of_one_point_is_seen(tmp_path, drawn):
    plots.curves(tmp_path / "p.png", [Panel({"long": ([1, 2], [3.0, 2.0]), "short": ([1], [9.0])}, "steps", "loss")])
    (figure,) = drawn
    assert [line.get_marker() != "None" for line in figure.axes[0].lines] == [False, True]

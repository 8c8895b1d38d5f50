"""Words on pictures: legible in any script, or as numbers; cut to their room."""

import pytest
from PIL import Image, ImageDraw

from trainer.telemetry import gallery


@pytest.fixture
def no_other_fonts(monkeypatch):
    monkeypatch.setattr(gallery, "FOLDERS", ())
    gallery._others.cache_clear()
    yield
    gallery._others.cache_clear()


@pytest.mark.parametrize("words", ["cat", "Köter", "Гладкошёрстная", "Άλφα", "a b-c", ""])
def test_most_languages_are_written_as_they_are(words, no_other_fonts):
    assert gallery.font_for(words, 12)[0] == words


def test_letters_without_a_font_are_told_apart(no_other_fonts):
    cat, dog = (gallery.font_for(name, 12)[0] for name in ("猫 1", "犬 1"))
    assert (cat, dog) == ("\\u732b 1", "\\u72ac 1")


@pytest.mark.parametrize(("words", "written"), [("cat\nx", "cat\\nx"), ("a\tb\r", "a\\tb\\r"), ("\x00", "\\x00")])
def test_what_breaks_a_line_is_written_out(words, written, no_other_fonts):
    assert gallery.font_for(words, 12)[0] == written and gallery.text_width(words, 12) > 0


def test_a_font_of_the_system_is_taken_where_it_has_the_letters(tmp_path, monkeypatch, no_other_fonts):
    """Matplotlib's signs for mathematics stand for a Chinese font: it has a letter that the first font lacks."""
    from importlib.util import find_spec
    from pathlib import Path
    from shutil import copy

    place = Path(find_spec("matplotlib").submodule_search_locations[0], "mpl-data/fonts/ttf/STIXNonUni.ttf")
    only = "\ue000"
    copy(place, tmp_path / "SomeCJK.ttf")
    assert gallery.font_for(only, 12)[0] == "\\ue000"
    monkeypatch.setattr(gallery, "FOLDERS", (str(tmp_path),))
    gallery._others.cache_clear()
    words, face = gallery.font_for(only, 12)
    assert words == only and face.path.endswith("SomeCJK.ttf")
    sheet = Image.new("L", (40, 40))
    ImageDraw.Draw(sheet).text((5, 5), words, 255, face)
    assert sheet.getbbox() is not None


@pytest.mark.parametrize("end", ["", " 57%", ", right"])
@pytest.mark.parametrize("words", ["short", "a very long name of a class", "猫" * 30])
@pytest.mark.parametrize("room", [60, 200])
def test_words_are_cut_to_their_room(words, end, room):
    found = gallery.fit(words, room, end, 12)
    assert found.endswith(end) and gallery.text_width(found, 12) <= room

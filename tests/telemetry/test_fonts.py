"""Words on pictures: legible in any script, or as numbers; cut to their room."""

import pytest

from trainer.telemetry import gallery


@pytest.mark.parametrize("words", ["cat", "Köter", "Гладкошёрстная", "Άλφα", "a b-c", ""])
def test_most_languages_are_written_as_they_are(words):
    assert gallery.font_for(words, 12)[0] == words


def test_letters_without_a_font_are_told_apart():
    cat, dog = (gallery.font_for(name, 12)[0] for name in ("猫 1", "犬 1"))
    assert (cat, dog) == ("\\u732b 1", "\\u72ac 1")


@pytest.mark.parametrize(("words", "written"), [("cat\nx", "cat\\nx"), ("a\tb\r", "a\\tb\\r"), ("\x00", "\\x00")])
def test_what_breaks_a_line_is_written_out(words, written):
    assert gallery.font_for(words, 12)[0] == written and gallery.text_width(words, 12) > 0


@pytest.mark.parametrize("end", ["", " 57%", ", right"])
@pytest.mark.parametrize("words", ["short", "a very long name of a class", "猫" * 30])
@pytest.mark.parametrize("room", [60, 200])
def test_words_are_cut_to_their_room(words, end, room):
    found = gallery.fit(words, room, end, 12)
    assert found.endswith(end) and gallery.text_width(found, 12) <= room

"""A table's text: encodings and separators of the programs that write one."""

import gzip

import pytest

from trainer.data.folders.table_names import read_lines
from trainer.errors import SetupError

TEXT = 'file,label\n\na.jpg,kätzchen\nb.jpg,"x, y"\n'


@pytest.fixture
def file(tmp_path):
    return tmp_path / "labels.csv"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_lines_keep_their_numbers(file, encoding):
    file.write_bytes(TEXT.replace("\n", "\r\n").encode(encoding))
    first, others, separator = read_lines(file)
    assert first == ["file", "label"] and separator == ","
    assert others == [(3, ["a.jpg", "kätzchen"]), (4, ["b.jpg", "x, y"])]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        *((TEXT.encode(other), "not text in UTF-8; save it as UTF-8") for other in ("utf-16", "utf-16-le")),
        (TEXT.encode("latin-1"), "line 3 is not text in UTF-8"),
        (b"PK\3\4\0\0", "not text in UTF-8; save it as .* CSV"),
        (gzip.compress(TEXT.encode(), mtime=0), "not text in UTF-8"),
        (b"file;labels\na.jpg;cat;dog\n", "line 2: 3 cells, and the header has 2; classes of one image with ;"),
        (b'file,label\na.jpg,"' + b"x" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_what_is_no_text(file, data, says):
    file.write_bytes(data)
    with pytest.raises(SetupError, match=says):
        read_lines(file)


@pytest.mark.parametrize(
    ("text", "separator", "cells"),
    [
        ("file\tlabels\na.jpg\tcat;dog, small", "\t", ["a.jpg", "cat;dog, small"]),
        ("file,labels\na.jpg,cat;dog", ",", ["a.jpg", "cat;dog"]),
        ("file;height\na.jpg;1,72", ";", ["a.jpg", "1,72"]),
        ('file, label\na.jpg, "cat, small"', ",", ["a.jpg", "cat, small"]),
        ('file; label\n"a;b.jpg"; "cat"', ";", ["a;b.jpg", "cat"]),
    ],
)
def test_the_first_line_tells_the_separator(file, text, separator, cells):
    file.write_text(text)
    _, others, found = read_lines(file)
    assert found == separator and others[0].cells == cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file label\na.png cat\nb.png dog\n", "commas between their cells"),
        ('"file"\t"label"\n"1"\t"a.png"\t"cat"\n', "line 2: 3 cells, and the header has 2"),  # R's row names
    ],
)
def test_tables_that_r_writes_are_refused(file, text, words):
    file.write_text(text)
    with pytest.raises(SetupError, match=words):
        read_lines(file)

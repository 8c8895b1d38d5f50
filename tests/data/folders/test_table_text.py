"""A table's text: encodings and separators of the programs that write one."""

import pytest

from trainer.data.folders.table_text import read_lines
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
        (TEXT.encode("utf-16"), "its text is UTF-16, save it as UTF-8"),
        (TEXT.encode("utf-16-le"), "its text is UTF-16, save it as UTF-8"),
        (TEXT.encode("latin-1"), "line 3 is not UTF-8 but another encoding, such as Latin-1; save it as UTF-8"),
        (b"PK\3\4\0\0", "it is a spreadsheet or an archive, save it as CSV"),
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
    ],
)
def test_the_first_line_tells_the_separator(file, text, separator, cells):
    file.write_text(text)
    found = read_lines(file)
    assert found.separator == separator and found.others[0].cells == cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"file" "label"\n"1" "a 1.png" "cat"\n"2" "b.png" "dog"\n', ["blanks between", "row.names=FALSE"]),
        ("file label\na.png cat\nb.png dog\n", ["blanks between", "write commas"]),
        ('"file"\t"label"\n"1"\t"a.png"\t"cat"\n', ["line 2", "row.names=FALSE"]),
        ('"file","label"\n"1","a.png","cat"\n"2","b.png","dog"\n', ["line 2", "row.names=FALSE"]),
    ],
)
def test_tables_that_r_writes_are_told(text, words, tmp_path):
    path = tmp_path / "labels.txt"
    path.write_text(text)
    with pytest.raises(SetupError) as caught:
        read_lines(path)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)

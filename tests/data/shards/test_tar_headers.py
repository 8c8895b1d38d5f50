"""Every kind of tar is read by its headers alone; one that is not whole says where."""

import io
import os
import random
import subprocess
import tarfile

import pytest

from tests.data.shards.making import tarred
from trainer.data.shards.tar_headers import BrokenError, Window, members, pax

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
LONG = "a" * 90 + "/" + "é" * 60 + "/" + "c" * 120 + ".jpg"


def found(path):
    """(name, bytes) of the files that are told before the end, and what is wrong there."""
    with open(path, "rb") as file:
        size, listed = os.fstat(file.fileno()).st_size, []
        try:
            for member in members(Window(file.fileno(), size)):
                listed.append((member.name, os.pread(file.fileno(), member.size, member.start), member.is_file))
        except BrokenError as error:
            return listed, str(error)
    return listed, None


def contents(seed=0, count=40):
    draw = random.Random(seed)
    return [
        (f"{n // 9}/{n:04}.jpg", draw.randbytes(draw.choice((0, 1, 511, 512, 513, 5000, 40_000)))) for n in range(count)
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_members_are_those_of_tarfile(tmp_path, kind):
    path = tarred(tmp_path / "a.tar", [("folder", None), *contents(), ("link", "0/0001.jpg")], format=FORMATS[kind])
    listed, wrong = found(path)
    assert wrong is None
    assert [(name, data) for name, data, is_file in listed if is_file] == contents()
    assert [name.rstrip("/") for name, _, is_file in listed if not is_file] == ["folder", "link"]


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_long_names(tmp_path, kind):
    path = tarred(tmp_path / "a.tar", [(LONG, b"one"), ("short", b"two")], format=FORMATS[kind])
    assert found(path) == ([(LONG, b"one", True), ("short", b"two", True)], None)


def test_a_name_in_two_parts_as_ustar_has_it(tmp_path):
    name = "a" * 90 + "/" + "b" * 90 + ".jpg"
    assert found(tarred(tmp_path / "a.tar", [(name, b"x")], format=tarfile.USTAR_FORMAT))[0][0][0] == name


def test_names_that_are_no_utf_8(tmp_path):
    name = os.fsdecode(b"\xff\xfe.jpg")
    for kind in FORMATS.values():
        path = tarred(tmp_path / "a.tar", [(name, b"x")], format=kind, encoding="utf-8", errors="surrogateescape")
        assert found(path)[0] == [(name, b"x", True)]


@pytest.mark.parametrize("more", [[], ["--format=v7"], ["--format=oldgnu"], ["--format=gnu"], ["--format=posix"]])
def test_what_gnu_tar_writes(tmp_path, more):
    for name, data in contents():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    subprocess.run(["tar", *more, "--sort=name", "-C", tmp_path / "in", "-cf", tmp_path / "a.tar", "."], check=True)
    listed, wrong = found(tmp_path / "a.tar")
    assert wrong is None and [(name, data) for name, data, file in listed if file] == [
        (f"./{name}", data) for name, data in contents()
    ]


def test_a_size_that_octal_digits_cannot_hold(tmp_path):
    """9 GB, as a file that is all hole; nothing of it is read."""
    path, size = tmp_path / "a.tar", 9 * 2**30
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member, small = tarfile.TarInfo("big"), tarfile.TarInfo("small")
        member.size, small.size = size, 1
        with open(path, "wb") as file:
            file.write(member.tobuf(kind))
            file.seek(size, io.SEEK_CUR)
            file.write(small.tobuf(kind) + b"x".ljust(1536, b"\0"))
        with open(path, "rb") as file:
            listed = [(one.name, one.size) for one in members(Window(file.fileno(), os.path.getsize(path)))]
        assert listed == [("big", size), ("small", 1)]


def test_tars_behind_one_another_are_read_to_the_last(tmp_path):
    one, other = (tarred(tmp_path / f"{n}.tar", contents(n, 5)).read_bytes() for n in range(2))
    both = tmp_path / "both.tar"
    both.write_bytes(one + other)
    assert [(name, data) for name, data, _ in found(both)[0]] == contents(0, 5) + contents(1, 5)


def test_every_cut_is_noticed_or_loses_nothing(tmp_path):
    whole = tarred(tmp_path / "a.tar", contents(3, 8)).read_bytes()
    path, wanted = tmp_path / "cut.tar", contents(3, 8)
    for end in [*range(0, len(whole), 509), *range(0, len(whole), 512)]:
        path.write_bytes(whole[:end])
        listed, wrong = found(path)
        told = [(name, data) for name, data, _ in listed]
        assert told == wanted[: len(told)], end
        if wrong is None:
            assert told == wanted, end
        else:
            assert "not a tar" not in wrong, end


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path):
    whole = bytearray(tarred(tmp_path / "a.tar", contents(4, 3), format=tarfile.USTAR_FORMAT).read_bytes())
    path, before = tmp_path / "b.tar", found(tmp_path / "a.tar")
    for bit in range(0, 500 * 8, 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        listed, wrong = found(path)
        assert ("not a tar" in str(wrong) and not listed) or (148 <= bit // 8 < 156 and (listed, wrong) == before)


def test_noise_behind_a_header_ends_in_a_sentence(tmp_path):
    draw, path = random.Random(0), tmp_path / "a.tar"
    whole = tarred(tmp_path / "b.tar", [(LONG, b"one"), ("two", b"x" * 700)], format=tarfile.PAX_FORMAT).read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        found(path)  # ends, and raises nothing else


def test_a_size_of_thousands_of_digits_is_damage(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo("a.jpg")
        member.pax_headers = {"size": "9" * 5000}
        file.addfile(member)
    listed, wrong = found(tmp_path / "a.tar")
    assert not listed and "pax" in wrong


def test_sparse_files_are_refused(tmp_path):
    with open(tmp_path / "hole.jpg", "wb") as file:
        file.truncate(2**20)
    for kind in ("gnu", "posix"):
        path = tmp_path / f"{kind}.tar"
        subprocess.run(["tar", f"--format={kind}", "-S", "-C", tmp_path, "-cf", path, "hole.jpg"], check=True)
        listed, wrong = found(path)
        assert not listed and "hole.jpg" in wrong and "--sparse" in wrong


@pytest.mark.parametrize("text", [b"5 a=", b"x a=b\n", b"0 a=b\n", b"99 a=b\n"])
def test_a_pax_header_that_makes_no_sense(text):
    if text == b"5 a=":
        text = b"9 a="
    with pytest.raises(BrokenError):
        pax(text)

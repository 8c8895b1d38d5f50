"""Damaged photos are found before the first step: refused, or skipped and told once, the same on every rank."""

import csv
import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.command_line import BARE, QUIET, losses, ok, result, trainer
from tests.data.photo_folders import photo_set
from tests.pages import GUIDE
from trainer.data import damaged as damaged_set
from trainer.data.damaged import looks_whole
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.data.photos import libjpeg

KINDS = ("jpg", "png", "webp", "gif", "bmp", "tiff")


def picture(path, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_images_look_whole_and_others_do_not(tmp_path, kind):
    path = picture(tmp_path / f"a.{kind}")
    assert looks_whole(os.fsencode(path))
    if kind in ("jpg", "png", "webp"):
        cut(path)
        assert not looks_whole(os.fsencode(path))
    zeros(path)
    assert not looks_whole(os.fsencode(path))
    path.write_text("no photo")
    assert not looks_whole(os.fsencode(path))


def test_what_a_phone_writes_behind_a_jpeg_is_no_damage(tmp_path):
    path = picture(tmp_path / "a.jpg")
    with path.open("ab") as file:
        file.write(b"SEFT" * 100)
    assert looks_whole(os.fsencode(path))


@pytest.fixture
def photos(tmp_path):
    """Twelve photos of each class to train on and six held out; two and one of them are damaged."""
    root = tmp_path / "photos"
    photo_set(root, {"ant": 12, "bee": 12}, split=True, parts=("train",))
    photo_set(root, {"ant": 6, "bee": 6}, split=True, parts=("val",))
    cut(root / "train" / "ant" / "3.jpg")
    zeros(root / "train" / "bee" / "5.jpg")
    cut(root / "val" / "ant" / "1.jpg")
    return root


def words_for(photos, name, *more):
    words = ["model.name=cnn_gn", "data.name=imagefolder", f"data.root={photos}", "data.image_size=32"]
    words += ["augment.crop=resized", "batch_size=8", "epochs=2", "data.workers=1", *QUIET, *BARE]
    words = ["mode=single", *words, f"output={photos.parent / name}", *more]
    return list({word.partition("=")[0]: word for word in words}.values())


def skipped(folder):
    with (folder / "skipped.csv").open(newline="") as file:
        return {(row["split"], "/".join(row["file"].split("/")[-2:])) for row in csv.DictReader(file) if row["reason"]}


ALL = {("train", "ant/3.jpg"), ("train", "bee/5.jpg"), ("val", "ant/1.jpg")}


@pytest.mark.parametrize("words", [(), ("augment.crop=none",)])  # in files, and decoded into memory
def test_they_are_refused_before_the_first_step(photos, words):
    done = trainer(*words_for(photos, "run", *words))
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr
    assert "train/ant/3.jpg" in done.stderr and "train/bee/5.jpg" in done.stderr
    assert "data.on_error=skip" in done.stderr and not (photos.parent / "run").exists()


def test_skipped_ones_are_listed_and_the_order_stays(photos):
    checked, unchecked = photos.parent / "checked", photos.parent / "unchecked"
    said = ok(*words_for(photos, "checked", "data.on_error=skip")).stdout
    assert skipped(checked) == ALL
    [line] = [line for line in said.splitlines() if "skipped.csv" in line]
    assert " 2 training" in line and " 1 held-out" in line
    ok(*words_for(photos, "unchecked", "data.on_error=skip", "data.check=off"))
    assert not (unchecked / "skipped.csv").exists()
    assert losses(checked) == losses(unchecked) and result(checked)["val_loss"] == result(unchecked)["val_loss"]
    told = ok("evaluate", f"checkpoint={checked}").stdout
    assert "11 held-out images" in told and "1 more cannot be read" in told


@pytest.mark.slow
def test_a_continued_run_keeps_the_list_and_its_order(photos):
    words = ("data.on_error=skip", "save.every_steps=2")
    ok(*words_for(photos, "whole", *words))
    killed = trainer(*words_for(photos, "parts", *words), env={"TRAINER_FAULT": "kill@0:4"})
    assert killed.returncode
    said = ok(*words_for(photos, "parts", *words, "resume=auto")).stdout
    folder = photos.parent / "parts"
    assert losses(folder) == losses(photos.parent / "whole") and skipped(folder) == ALL
    assert "skipped.csv" not in said  # told once


def test_every_rank_refuses_what_one_of_them_saw(photos):
    done = trainer(*words_for(photos, "run", "mode=ddp"), "nproc=2")
    assert done.returncode == 3 and done.stderr.count("cannot be read") == 1, done.stderr
    assert "train/ant/3.jpg" in done.stderr and "val/ant/1.jpg" in done.stderr


def photo(kind, number, **options):
    """An encoded image with the smooth parts and the details of a photo."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((400, 300), Image.BICUBIC)
    pixels = np.asarray(coarse) + random.normal(0, 6, (300, 400, 3))
    encoded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, kind, **options)
    return encoded.getvalue()


ENDS = {"JPEG": b"\xff\xd9", "PNG": b"\0\0\0\0IEND\xaeB`\x82"}
DAMAGES = {
    "cut": lambda data, _: data[: len(data) // 2],
    "cut, end marker added": lambda data, kind: data[: len(data) // 3] + ENDS.get(kind, b""),
    "zeros in the middle": lambda data, _: data[: len(data) // 2] + bytes(4096) + data[len(data) // 2 + 4096 :],
    "one bit flipped": lambda data, _: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
}
KIND = {"WebP": "WEBP", "JPEG 2000": "JPEG2000"}  # what Pillow calls a format of the guide's table


def claims():
    """The guide's table: by format and damage, how many of 20 are found."""
    _, _, text = (GUIDE / "photos.md").read_text().partition("| format | cut |")
    head, _, *rows = text.partition("\n\n")[0].splitlines()
    for row in rows:
        names, *counts = [cell.strip() for cell in row.strip("|").split("|")]
        for name in names.split(", "):
            yield from ((name, *pair) for pair in zip(("cut", *head.strip(" |").split(" | ")), counts, strict=True))


@pytest.mark.parametrize(("name", "damage", "count"), [*claims()])
def test_what_the_guide_says_is_found_is_found(name, damage, count, tmp_path):
    kind = KIND.get(name, name)
    encoded = [photo(kind, number) for number in range(4)]
    assert found(tmp_path, encoded) == []
    seen = found(tmp_path, [DAMAGES[damage](data, kind) for data in encoded])
    assert seen == [0, 1, 2, 3] if count == "20" else len(seen) < 4


def test_a_few_bytes_before_the_end_are_no_damage(tmp_path):
    encoded = photo("JPEG", 0)
    assert found(tmp_path, [encoded[:-2] + b"abc" + encoded[-2:]]) == []
    assert found(tmp_path, [encoded[:-2] + b"abc" * 100 + encoded[-2:]]) == [0]


def test_what_others_write_to_stderr_is_not_lost(capfd):
    with libjpeg.heard() as complaint:
        os.write(2, b"of another\n")
        assert complaint() == ""
        libjpeg.decode_whole(np.frombuffer(DAMAGES["cut, end marker added"](photo("JPEG", 0), "JPEG"), np.uint8).copy())
        assert "premature end" in complaint() and complaint() == ""
    assert capfd.readouterr().err == "of another\n"


def found(folder, encoded):
    """Which of these files `data.check=full` calls damaged."""
    for place, data in enumerate(encoded):
        (folder / f"{place}.x").write_bytes(data)
    part = PhotoFolder(folder, [f"{place}.x" for place in range(len(encoded))], np.zeros(len(encoded), int))
    data = SimpleNamespace(channels=3, image_size=64)
    with ThreadPoolExecutor(2) as pool:
        return [place for place, why in damaged_set._undecodable(part, range(len(encoded)), data, pool) if why]


@pytest.mark.parametrize("words", [(), ("augment.crop=none",)])  # in files, and decoded into memory
def test_full_finds_a_jpeg_that_decodes_to_a_wrong_picture(words, photos):
    for part, name in (("train", "ant/3.jpg"), ("train", "bee/5.jpg"), ("val", "ant/1.jpg")):
        os.unlink(photos / part / name)
    for name, damage in (("ant/4.jpg", "zeros in the middle"), ("bee/2.jpg", "cut, end marker added")):
        (photos / "train" / name).write_bytes(DAMAGES[damage](photo("JPEG", 1), "JPEG"))
    ok(*words_for(photos, "headers", *words))
    done = trainer(*words_for(photos, "run", *words, "data.check=full"))
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr
    assert "train/ant/4.jpg" in done.stderr and "train/bee/2.jpg" in done.stderr and "1 more of" in done.stderr


def test_photos_in_shards_are_looked_at(tmp_path):
    encoded = io.BytesIO()
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(encoded, "JPEG")
    with tarfile.open(tmp_path / "set.tar", "w") as shard:
        for name in ("ant", "bee"):
            for number in range(12):
                data = encoded.getvalue()[: 300 if (name, number) == ("bee", 7) else None]
                member = tarfile.TarInfo(f"{name}/{number}.jpg")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    done = trainer(*words_for(tmp_path / "set.tar", "run", "data.name=shards"))
    assert done.returncode == 3 and "bee/7.jpg" in done.stderr and not (tmp_path / "run").exists()

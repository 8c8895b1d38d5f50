"""Photos from the cache are those of the folder, at the size that they are stored in; and blocks are found by what they
are made of: one photo more, less or changed is one block anew."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.photo_folders import photo_set, read_image, whole
from tests.data.photos.test_lazy_images import saved, scene
from trainer.data.cache import stored as module
from trainer.data.cache.cached_set import make, missing
from trainer.data.cache.stored import (
    MOST,
    CachedFolder,
    Format,
    block_path,
    measure_reading,
    pack,
    picture_of,
    prepared,
)
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import held_out
from trainer.recipe import load


def test_a_small_photo_is_stored_as_it_is(tmp_path):
    path = saved(tmp_path / "a.png")
    how = Format("raw", 700, 3)
    picture = picture_of(prepared(os.fsencode(path), how), how)
    assert torch.equal(whole(picture), read_image(path, 3))


def test_what_is_held_out_has_the_same_pixels_with_the_cache(tmp_path):
    """Of the size for evaluation: that is what is stored, and it is stored as it is."""
    path, how = saved(tmp_path / "a.jpg"), Format("raw", 128, 3)
    stored = picture_of(prepared(os.fsencode(path), how), how)
    assert torch.equal(held_out(stored, 112), held_out(open_image(path, 3), 112))


@pytest.mark.parametrize("layout", ["raw", "jpeg"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_lies_where_it_lay(tmp_path, layout, channels):
    path, how = saved(tmp_path / "a.jpg", orientation=6), Format(layout, 200, channels)
    stored = prepared(os.fsencode(path), how)
    assert min(stored.rows, stored.columns) == 200
    picture, photo = picture_of(stored, how), open_image(path, channels)
    assert (picture.height, picture.width) == (photo.height, photo.width)
    box = (150, 100, 300, 400)
    one, other = (part.pixels(box, 10**6).float().mean((1, 2)) for part in (picture, photo))
    assert torch.allclose(one, other, atol=3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Four photos, one of which cannot be read, and their cache: one block."""
    monkeypatch.setattr("trainer.data.cache.stored.TOGETHER", 2**60)
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        Image.fromarray(scene(60 + number, 90)).save(tmp_path / name)
    (tmp_path / names[2]).write_bytes(b"no image")
    folder, how = PhotoFolder(tmp_path, names, np.arange(4)), Format("raw", 30, 3)
    packing = pack([folder], how)
    home = tmp_path / "cache"
    home.mkdir()
    for key, paths in zip(packing.keys, packing.paths, strict=True):
        make(str(home), key.tobytes(), paths, how)
    return CachedFolder(folder, how, 0, home, packing), home, packing


def test_a_folder_is_read_from_its_cache(cache, tmp_path):
    folder, home, packing = cache
    assert not missing(packing, home) and len(folder) == 4
    path = folder.where(1)
    before = whole(folder.open(1, 3)[0])
    assert before.shape == (3, 30, 44) and folder.open(1, 3)[1] == 1
    Path(path).write_bytes(b"")  # the photo itself is not looked at
    assert torch.equal(whole(folder.open(1, 3)[0]), before)
    with pytest.raises(Exception, match="cannot identify"):
        folder.open(2, 3)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "swapped"])
def test_a_damaged_photo_is_prepared_anew_and_its_block_goes(cache, damage):
    folder, home, packing = cache
    wanted = [whole(folder.open(index, 3)[0]) for index in (0, 1, 3)]
    path = Path(block_path(str(home), packing.keys[0].tobytes()))
    raw = path.read_bytes()
    path.unlink()
    left = {"flipped": raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:], "cut": raw[:-100], "swapped": raw[::-1]}
    if damage in left:  # else it is gone
        path.write_bytes(left[damage])
    assert all(torch.equal(whole(folder.open(index, 3)[0]), was) for index, was in zip((0, 1, 3), wanted, strict=True))
    assert missing(packing, home) == [0], "what is damaged is made anew by the next run"


LARGE = Format("raw", 256, 3)


def folder(root, names):
    return PhotoFolder(root, names, np.zeros(len(names), np.int64))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    names = [f"{number:05}.jpg" for number in range(3000)]
    for name in names:
        (root / name).write_bytes(name.encode())
    return root, names


def keys(root, *parts, how=LARGE):
    """Of the blocks of parts with these photos."""
    return {key.tobytes() for key in pack([folder(root, names) for names in parts], how).keys}


def test_every_photo_lies_where_it_is_said(photos):
    root, names = photos
    parts = [folder(root, names[::3]), folder(root, names[1::3][::-1])]
    packing = pack(parts, LARGE)
    assert sum(map(len, packing.paths)) == 2000 and max(map(len, packing.paths)) <= MOST and len(packing.paths) > 1
    for part, places in zip(parts, packing.places, strict=True):
        found = [packing.paths[block][row] for block, row in places]
        assert found == [os.fsencode(part.where(index)) for index in range(len(part))]


def test_however_they_are_divided_the_blocks_are_the_same(photos):
    root, names = photos
    divided = keys(root, names[:100], names[100:])
    assert divided == keys(root, names[1500:], names[:1500]) == keys(root, names, names)


def test_what_changes_one_photo_changes_one_block(photos):
    root, names = photos
    before, blocks = keys(root, names), pack([folder(root, names)], LARGE).paths
    path = Path(os.fsdecode(next(block[0] for block in blocks if 1 < len(block) < MOST)))  # not a block's end
    less = keys(root, [name for name in names if name != path.name])
    assert len(before - less) == 1 == len(less - before)
    content, facts = path.read_bytes(), path.stat()

    def written(content, later=0):
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + later))
        return keys(root, names)

    for changed in (written(content, later=1), written(b"longer than before")):
        assert len(before - changed) == 1 == len(changed - before)
    assert written(content) == before


@pytest.mark.parametrize("how", [Format("jpeg", 256, 3), Format("raw", 255, 3), Format("raw", 256, 1)])
def test_another_preparation_is_another_block(photos, how):
    root, names = photos
    assert not keys(root, names) & keys(root, names, how=how)


@pytest.fixture
def six(tmp_path):
    return folder(photo_set(tmp_path, {"cat": 6}), [f"cat/{number}.jpg" for number in range(6)])


def test_decoding_and_transforming_are_told_apart(six, monkeypatch):
    opened = module.open_encoded

    def slow(decode):
        def decoded(factor):
            time.sleep(0.02)
            return decode(factor)

        return decoded

    def open_slowly(*given):
        picture = opened(*given)
        return replace(picture, decode=slow(picture.decode))

    monkeypatch.setattr(module, "open_encoded", open_slowly)
    apply = module.PhotoDraws.apply

    def apply_slowly(*given):
        time.sleep(0.05)
        return apply(*given)

    monkeypatch.setattr(module.PhotoDraws, "apply", apply_slowly)
    found = measure_reading(six, load(None, "augment.crop=resized"), 32, 3)
    assert found.decode >= 0.02 and found.transform >= 0.05 and found.cached >= 0.05
    assert found.read < 0.02 and found.whole == found.read + found.decode + found.transform


def test_it_leaves_no_trace_and_leaves_out_what_cannot_be_read(six):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for number in range(6):
        assert measure_reading(six, load(None, "augment.crop=resized", "augment.auto=rand"), 32, 3).whole > 0
        Path(six.where(number)).write_bytes(b"no image")
    assert measure_reading(six, load(None, "augment.crop=resized"), 32, 3) is None
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)

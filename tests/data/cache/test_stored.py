"""Photos from the cache equal those of the folder at the stored size.

The key of a block depends on its photos: adding, removing or changing one makes a new block.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.photo_folders import photo_set, read_image, saved, scene, whole
from trainer.data.cache import stored as module
from trainer.data.cache.cached_set import build_block, list_missing
from trainer.data.cache.stored import (
    MAX_PHOTOS_PER_BLOCK,
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
from trainer.data.photos.photo_reader import prepare_for_evaluation
from trainer.recipe import load


def test_a_small_photo_is_stored_as_it_is(tmp_path):
    path = saved(tmp_path / "a.png")
    how = Format("raw", 700, 3)
    picture = picture_of(prepared(os.fsencode(path), how), how)
    assert torch.equal(whole(picture), read_image(path, 3))


def test_validation_images_have_the_same_pixels_with_the_cache(tmp_path):
    """The stored size is that of evaluation, and the pixels are stored unchanged."""
    path = saved(tmp_path / "a.jpg")
    how = Format("raw", 128, 3)
    stored = picture_of(prepared(os.fsencode(path), how), how)
    assert torch.equal(
        prepare_for_evaluation(stored, 112), prepare_for_evaluation(open_image(path, 3), 112)
    )


@pytest.mark.parametrize("layout", ["raw", "jpeg"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_lies_where_it_lay(tmp_path, layout, channels):
    path = saved(tmp_path / "a.jpg", orientation=6)
    how = Format(layout, 200, channels)
    stored = prepared(os.fsencode(path), how)
    assert min(stored.rows, stored.columns) == 200
    picture = picture_of(stored, how)
    photo = open_image(path, channels)
    assert (picture.height, picture.width) == (photo.height, photo.width)
    box = (150, 100, 300, 400)
    one, other = (part.pixels(box, 10**6).float().mean((1, 2)) for part in (picture, photo))
    assert torch.allclose(one, other, atol=3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Four photos, one of them unreadable, and their cache of one block."""
    monkeypatch.setattr("trainer.data.cache.stored.PHOTOS_PER_BLOCK", 2**60)
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        Image.fromarray(scene(60 + number, 90)).save(tmp_path / name)
    (tmp_path / names[2]).write_bytes(b"no image")
    folder = PhotoFolder(tmp_path, names, np.arange(4))
    how = Format("raw", 30, 3)
    packing = pack([folder], how)
    home = tmp_path / "cache"
    home.mkdir()
    for key, paths in zip(packing.keys, packing.paths, strict=True):
        build_block(str(home), key, paths, how)
    return CachedFolder(folder, how, 0, home, packing), home, packing


def test_a_folder_is_read_from_its_cache(cache, tmp_path):
    folder, home, packing = cache
    assert not list_missing(packing, home) and len(folder) == 4
    path = folder.where(1)
    before = whole(folder.open(1, 3)[0])
    assert before.shape == (3, 30, 44)
    assert folder.open(1, 3)[1] == 1
    Path(path).write_bytes(b"")  # the photo itself is not looked at
    assert torch.equal(whole(folder.open(1, 3)[0]), before)
    with pytest.raises(Exception, match="cannot identify"):
        folder.open(2, 3)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "swapped"])
def test_a_damaged_photo_is_prepared_again_and_its_block_is_deleted(cache, damage):
    folder, home, packing = cache
    expected = [whole(folder.open(index, 3)[0]) for index in (0, 1, 3)]
    path = Path(block_path(str(home), packing.keys[0]))
    raw = path.read_bytes()
    path.unlink()
    left = {
        "flipped": raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:],
        "cut": raw[:-100],
        "swapped": raw[::-1],
    }
    if damage in left:  # else it is gone
        path.write_bytes(left[damage])
    assert all(
        torch.equal(whole(folder.open(index, 3)[0]), was)
        for index, was in zip((0, 1, 3), expected, strict=True)
    )
    assert list_missing(packing, home) == [0], "what is damaged is made anew by the next run"


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
    """Return the keys of blocks of splits with these photos."""
    return set(pack([folder(root, names) for names in parts], how).keys)


def test_every_photo_is_at_its_offset(photos):
    root, names = photos
    parts = [folder(root, names[::3]), folder(root, names[1::3][::-1])]
    packing = pack(parts, LARGE)
    assert (
        sum(map(len, packing.paths)) == 2000
        and max(map(len, packing.paths)) <= MAX_PHOTOS_PER_BLOCK
        and len(packing.paths) > 1
    )
    for part, places in zip(parts, packing.places, strict=True):
        actual = [packing.paths[block][row] for block, row in places]
        assert actual == [os.fsencode(part.where(index)) for index in range(len(part))]


def test_however_they_are_divided_the_blocks_are_the_same(photos):
    root, names = photos
    divided = keys(root, names[:100], names[100:])
    assert (
        divided
        == keys(
            root,
            names[1500:],
            names[:1500],
        )
        == keys(root, names, names)
    )


def test_changing_a_photo_changes_one_block(photos):
    root, names = photos
    before = keys(root, names)
    blocks = pack([folder(root, names)], LARGE).paths
    # Not a block's end.
    first_photos = (block[0] for block in blocks if 1 < len(block) < MAX_PHOTOS_PER_BLOCK)
    path = Path(os.fsdecode(next(first_photos)))
    less = keys(root, [name for name in names if name != path.name])
    assert len(before - less) == 1 == len(less - before)
    content = path.read_bytes()
    facts = path.stat()

    def written(content, later=0):
        path.write_bytes(content)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + later))
        return keys(root, names)

    for changed in (written(content, later=1), written(b"longer than before")):
        assert len(before - changed) == 1 == len(changed - before)
    assert written(content) == before


@pytest.mark.parametrize(
    "how", [Format("jpeg", 256, 3), Format("raw", 255, 3), Format("raw", 256, 1)]
)
def test_another_preparation_is_another_block(photos, how):
    root, names = photos
    assert not keys(root, names) & keys(root, names, how=how)


@pytest.fixture
def six(tmp_path):
    return folder(photo_set(tmp_path, {"cat": 6}), [f"cat/{number}.jpg" for number in range(6)])


def test_decoding_and_transforming_are_timed_separately(six, monkeypatch):
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
    actual = measure_reading(six, load(None, "augment.crop=resized"), 32, 3)
    assert actual.decode >= 0.02 and actual.transform >= 0.05 and actual.cached >= 0.05
    assert actual.read < 0.02 and actual.whole == actual.read + actual.decode + actual.transform


def test_a_measurement_writes_no_files_and_skips_unreadable_photos(six):
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    for number in range(6):
        assert (
            measure_reading(
                six, load(None, "augment.crop=resized", "augment.auto=rand"), 32, 3
            ).whole
            > 0
        )
        Path(six.where(number)).write_bytes(b"no image")
    assert measure_reading(six, load(None, "augment.crop=resized"), 32, 3) is None
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)

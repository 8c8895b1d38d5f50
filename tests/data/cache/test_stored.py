"""Photos from the cache are those of the folder, at the size that they are stored in."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.photos.test_lazy_images import saved, scene
from trainer.data.cache.cached_set import make, missing
from trainer.data.cache.stored import CachedFolder, Format, block_path, pack, picture_of, prepared
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.data.photos.decoding import open_image
from trainer.data.photos.photo_reader import held_out


def pixels(picture):
    return picture.whole(max(picture.height, picture.width))


def test_a_small_photo_is_stored_as_it_is(tmp_path):
    path = saved(tmp_path / "a.png")
    how = Format("raw", 700, 3)
    picture = picture_of(prepared(os.fsencode(path), how), how)
    assert torch.equal(pixels(picture), pixels(open_image(path, 3)))


def test_what_is_held_out_has_the_same_pixels_with_the_cache(tmp_path):
    """Of the size for evaluation: that is what is stored, and it is stored as it is."""
    path, how = saved(tmp_path / "a.jpg"), Format("raw", 128, 3)
    assert torch.equal(
        held_out(picture_of(prepared(os.fsencode(path), how), how), 112), held_out(open_image(path, 3), 112)
    )


@pytest.mark.parametrize("layout", ["raw", "jpeg"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_lies_where_it_lay(tmp_path, layout, channels):
    path, how = saved(tmp_path / "a.jpg", orientation=6), Format(layout, 200, channels)
    stored = prepared(os.fsencode(path), how)
    assert min(stored.rows, stored.columns) == 200
    picture, whole = picture_of(stored, how), open_image(path, channels)
    assert (picture.height, picture.width) == (whole.height, whole.width)
    box = (150, 100, 300, 400)
    one, other = (part.pixels(box, 10**6).float().mean((1, 2)) for part in (picture, whole))
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
    before = pixels(folder.open(1, 3)[0])
    assert before.shape == (3, 30, 44) and folder.open(1, 3)[1] == 1
    Path(path).write_bytes(b"")  # the photo itself is not looked at
    assert torch.equal(pixels(folder.open(1, 3)[0]), before)
    with pytest.raises(Exception, match="cannot identify"):
        folder.open(2, 3)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "swapped"])
def test_a_damaged_photo_is_prepared_anew_and_its_block_goes(cache, damage):
    folder, home, packing = cache
    wanted = [pixels(folder.open(index, 3)[0]) for index in (0, 1, 3)]
    path = Path(block_path(str(home), packing.keys[0].tobytes()))
    raw = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(raw[:-100])
    elif damage == "flipped":
        raw[-5] ^= 1
        path.write_bytes(raw)
    else:
        path.write_bytes(raw[::-1])
    assert all(torch.equal(pixels(folder.open(index, 3)[0]), was) for index, was in zip((0, 1, 3), wanted, strict=True))
    assert missing(packing, home) == [0], "what is damaged is made anew by the next run"

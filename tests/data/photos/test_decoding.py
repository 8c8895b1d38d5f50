"""Decoding: photos of phones stand upright, whatever kind of file they are, and kinds that cannot be read say why."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from tests.data.photo_folders import read_image
from trainer.data.photos import decoding
from trainer.data.photos.decoding import formats

TURNS = {  # how the upright picture has to be turned, and mirrored, so that the tag turns it back
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, -1),
}


def upright():
    """Four fields of 32 x 48 that look different in each of the eight orientations."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24], pixels[:16, 24:], pixels[16:, :24] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    return pixels


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def close(image, pixels):
    wanted = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return image.shape == wanted.shape and (image.int() - wanted.int()).abs().float().mean() < 12


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "avif"])
@pytest.mark.parametrize("orientation", TURNS)
def test_photos_stand_upright(tmp_path, suffix, orientation):
    path, pixels = tmp_path / f"a.{suffix}", upright()
    Image.fromarray(np.ascontiguousarray(TURNS[orientation](pixels))).save(path, exif=exif(orientation))
    assert close(read_image(str(path), 3), pixels)
    assert read_image(str(path), 1).shape == (1, 32, 48)


@pytest.mark.parametrize(
    "tags", [b"Exif\0\0" + b"\xff" * 40, b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0"]
)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_an_orientation_that_makes_no_sense_turns_nothing(tmp_path, suffix, tags):
    path, pixels = tmp_path / f"a.{suffix}", upright()
    Image.fromarray(pixels).save(path, exif=tags)
    assert close(read_image(str(path), 3), pixels)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_heic_is_read_upright_where_its_package_is_installed(tmp_path, orientation):
    pillow_heif = pytest.importorskip("pillow_heif", reason="pip install pillow-heif")
    pillow_heif.register_heif_opener()
    path, pixels = tmp_path / "IMG_0001.HEIC", upright().repeat(4, 0).repeat(4, 1)
    turned = Image.fromarray(np.ascontiguousarray(TURNS[orientation](pixels)))
    turned.info["exif"] = exif(orientation).tobytes()  # makes it write the turn where HEIC has it, as phones do
    turned.save(path, format="HEIF")
    assert close(read_image(str(path), 3), pixels)


def test_heic_that_cannot_be_read_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "formats", lambda: tuple(name for name in formats() if name != "HEIF"))
    path = tmp_path / "IMG_0001.jpg"  # as a phone's share button calls it
    path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    with pytest.raises(ValueError, match="pip install pillow-heif"):
        read_image(str(path), 3)


def test_pixels_of_sixteen_bits_and_of_a_palette_turn_too(tmp_path):
    deep = np.zeros((32, 48), np.uint16)
    deep[:16] = 60_000
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(deep[::-1, ::-1])).save(file, "PNG", exif=exif(3))
    (tmp_path / "deep.png").write_bytes(file.getvalue())
    found = read_image(str(tmp_path / "deep.png"), 1)
    assert found.shape == (1, 32, 48) and found[0, 0, 0] > 200 and found[0, -1, 0] == 0
    Image.fromarray(np.ascontiguousarray(np.rot90(upright()))).convert("P").save(tmp_path / "p.png", exif=exif(6))
    assert close(read_image(str(tmp_path / "p.png"), 3), upright())


def test_real_pixels_are_as_bright_as_they_were(tmp_path):
    values = np.tile(np.linspace(0, 1, 48, dtype=np.float32), (32, 1))
    values[0, 0] = np.nan
    Image.fromarray(values).save(tmp_path / "real.tiff")
    found = read_image(str(tmp_path / "real.tiff"), 1)[0].int()
    assert (found - torch.linspace(0, 255, 48).int()).abs().max() <= 1


@pytest.mark.parametrize("ends", [(-0.02, 1.02), (0, 1.01)])
def test_real_pixels_slightly_beyond_black_or_white_are_those(tmp_path, ends):
    """As filters leave them that sharpen or enlarge."""
    Image.fromarray(np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))).save(tmp_path / "real.tiff")
    found = read_image(str(tmp_path / "real.tiff"), 1)[0].int()
    assert found[0, 0] == 0 and found[0, -1] == 255 and abs(found[0, 24] - 130) <= 4


@pytest.mark.parametrize("ends", [(-1, 1), (0, 255), (0, 65535), (0, 1e6), (0, 70000)])
def test_real_pixels_of_another_range_are_refused(tmp_path, ends):
    Image.fromarray(np.tile(np.linspace(*ends, 48, dtype=np.float32), (32, 1))).save(tmp_path / "real.tiff")
    says = f"numbers from {ends[0]:g} to {ends[1]:g}: data.pixel_range=[{ends[0]},{ends[1]:.7g}] says"
    with pytest.raises(ValueError, match=re.escape(says)):
        read_image(str(tmp_path / "real.tiff"), 3)

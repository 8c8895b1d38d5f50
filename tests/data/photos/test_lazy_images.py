"""Images are decoded no larger than they are needed: the same picture, from fewer pixels."""

import random

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as vision

from tests.data.photo_folders import HEIGHT, TURNS, WIDTH, read_image, saved, scene
from trainer.data.photos import decoding, photo_reader
from trainer.data.photos.decoding import open_image
from trainer.data.photos.lazy_images import FINE, Picture
from trainer.data.photos.photo_reader import prepare_for_evaluation, resize


@pytest.mark.parametrize("orientation", TURNS)
def test_a_part_is_the_part_of_the_whole(tmp_path, orientation):
    path = saved(tmp_path / "a.jpg", orientation)
    picture = open_image(path, 3)
    whole = read_image(path, 3)
    assert (picture.height, picture.width) == (HEIGHT, WIDTH) == whole.shape[1:]
    drawn = random.Random(orientation)
    smaller = 0
    for _ in range(30):
        h = drawn.randrange(20, HEIGHT + 1)
        w = drawn.randrange(20, WIDTH + 1)
        top = drawn.randrange(HEIGHT - h + 1)
        left = drawn.randrange(WIDTH - w + 1)
        least = drawn.randrange(8, 120)
        part = picture.pixels((top, left, h, w), least)
        assert part.shape[1] >= min(h, least)
        assert part.shape[2] >= min(w, least)
        expected = whole[:, top : top + h, left : left + w]
        if min(h, w) < 2 * max(least, FINE):
            assert torch.equal(part, expected), "no smaller one will do"
            continue
        smaller += part.shape[1] < h
        one, other = (resize(image, [16, 16]).float() for image in (part, expected))
        assert (one - other).abs().mean() < 4, (top, left, h, w, least)
    assert smaller > 3


@pytest.mark.parametrize(
    ("least", "factor"), [(800, 1), (400, 2), (200, 4), (140, 4), (130, 8), (8, 8)]
)
def test_a_jpeg_is_decoded_as_small_as_allowed(tmp_path, least, factor):
    Image.fromarray(scene(1046, 1203)).save(tmp_path / "a.jpg")
    whole = open_image(str(tmp_path / "a.jpg"), 3).whole(least)
    assert whole.shape[1:] == (-(-1046 // factor), -(-1203 // factor))


@pytest.mark.parametrize("shape", [(2, 1900), (1900, 2), (1, 1001)])
def test_a_stripe_that_would_fill_the_memory_is_refused(shape):
    """2 x 8,000 pixels would become 256 x 1,024,000."""
    image = torch.from_numpy(scene(*shape)).permute(2, 0, 1)
    if max(shape) > 1000 * min(shape):
        with pytest.raises(ValueError, match="cut it"):
            prepare_for_evaluation(Picture.of(image), 224)
        return
    assert prepare_for_evaluation(Picture.of(image), 224).shape == (3, 224, 224)


@pytest.mark.parametrize("factor", [1, 2])
def test_images_that_pillow_refuses_may_be_read_by_torchvision(tmp_path, monkeypatch, factor):
    path = saved(tmp_path / "a.jpg", 6)
    expected = read_image(path, 3)

    def refused(*_):
        raise SyntaxError("not a JPEG for Pillow")

    monkeypatch.setattr(decoding, "JpegImageFile", refused)
    assert torch.equal(open_image(path, 3).decode(factor), expected)
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:2000])
    with pytest.raises(SyntaxError, match="for Pillow"):
        open_image(str(tmp_path / "b.jpg"), 3).decode(factor)


@pytest.mark.parametrize("vectorised", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_is_torchvisions(channels, vectorised, monkeypatch):
    """Bit for bit, and as channels_last, in which a batch is filled fastest."""
    monkeypatch.setattr(photo_reader, "VECTORISED", vectorised and photo_reader.VECTORISED)
    whole = torch.randint(
        0,
        256,
        (70, 90, channels),
        dtype=torch.uint8,
    ).permute(2, 0, 1)
    crops = [
        whole,
        whole[:, 3:50, 7:80],
        whole[:, :20, :30],
        whole[:, 5:6, 5:6],
        whole[:, :40, :40],
        whole.contiguous(),
    ]
    for crop in crops:
        for size in (
            [40, 40],
            [16, 24],
            [100, 90],
            [24],
        ):
            actual = resize(crop, size)
            expected = vision.resize(crop.contiguous(), size, antialias=True)
            assert torch.equal(actual, expected)
            assert crop.shape[1:] == (1, 1) or actual[None].is_contiguous(
                memory_format=torch.channels_last
            )

"""Whole-batch augmentation, held against the plainest way of doing the same to one image; and
batches turned back.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.simcuda import simulated
from trainer.data import (
    DataShare,
    Example,
    Loader,
    TensorSpec,
    as_pictures,
    open_datasets,
    sampling,
)
from trainer.data.augment import (
    Auto,
    DeviceTransform,
    Draws,
    Gallery,
    resize_crops,
)
from trainer.data.photos.photo_reader import PhotoDraws
from trainer.recipe import AugmentRecipe, load
from trainer.training.setup import create_task

CPU = torch.device("cpu")


def images(count, channels=3, size=9):
    return torch.randint(
        0,
        256,
        (count, channels, size, size),
        dtype=torch.uint8,
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_padded_crops_and_mirrors_match_single_images(channels):
    recipe = AugmentRecipe(crop="pad", crop_padding=2, hflip=0.5)
    pictures = images(20, channels)
    index = np.array([3, 19, 3, 0, 7, 7, 11])
    draws = Draws.of(recipe, 0, 0, index, 9, CPU)
    accepted = Gallery(pictures, 2, CPU).take(torch.from_numpy(index), draws)
    assert accepted.shape == (7, 9, 9, channels)
    for row, sample in enumerate(index):
        top, left = draws.shift[row].tolist()
        expected = F.pad(pictures[sample], (2, 2, 2, 2))[:, top : top + 9, left : left + 9]
        expected = expected.flip(2) if draws.flip[row] else expected
        assert torch.equal(accepted[row].permute(2, 0, 1), expected)
    assert draws.flip.any() and not draws.flip.all()


def test_alternating_mirrors_show_each_image_from_both_sides_in_two_epochs():
    """Small images and photos are mirrored at random in the first epoch, and in every epoch without
    the key.
    """
    index = np.arange(400)

    def of(kind, epoch, **words):
        recipe = AugmentRecipe(hflip=0.3, **words)
        if kind == "photos":
            return PhotoDraws(recipe, 5, epoch, index).flip
        return Draws.of(recipe, 5, epoch, index, 9, CPU).flip.numpy()

    for kind in ("small", "photos"):
        actual = [of(kind, epoch, alternate=True) for epoch in range(5)]
        plain = [of(kind, epoch) for epoch in range(5)]
        assert np.array_equal(actual[0], plain[0])
        assert 80 < actual[0].sum() < 160
        for epoch in range(1, 5):
            assert np.array_equal(actual[epoch], actual[0] ^ (epoch % 2 == 1))
            assert 80 < plain[epoch].sum() < 160
            assert not np.array_equal(plain[epoch], plain[0])


def test_a_resized_crop_of_everything_is_the_image_and_of_a_corner_its_enlargement():
    picture = images(2, size=8).permute(0, 2, 3, 1).contiguous()
    same = resize_crops(
        picture,
        torch.tensor([[0, 0, 8, 8], [0, 4, 4, 4]]),
    )
    assert torch.equal(same[0], picture[0])
    corner = picture[1:, :4, 4:].permute(0, 3, 1, 2).float()
    expected = F.interpolate(
        corner,
        size=(8, 8),
        mode="bilinear",
    )[0].round()
    # Pixels at the border of a crop come from their neighbors.
    inside = same[1].permute(2, 0, 1)[:, 1:-1, 1:-1].float()
    assert (inside - expected[:, 1:-1, 1:-1]).abs().max() <= 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalisation(channels_last):
    mean = (0.5, 0.25, 0.1)
    std = (0.2, 0.3, 0.4)
    finish = DeviceTransform(mean, std, 9, channels_last, CPU)
    pictures = images(4)
    actual = finish.inputs(pictures.permute(0, 2, 3, 1).contiguous())
    expected = (pictures / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert torch.allclose(actual, expected, atol=1e-5)
    assert actual.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )


def test_erasing_sets_the_box_alone_here_and_on_a_gpu():
    boxes = np.array(
        [
            [0, 0, 0, 0],
            [1, 2, 3, 4],
            [0, 0, 8, 8],
            [5, 5, 3, 3],
        ]
    )
    inputs = torch.randn(4, 3, 8, 8)
    collected = []
    expected = inputs.clone()
    expected[1, :, 1:4, 2:6], expected[2], expected[3, :, 5:, 5:] = 0, 0, 0
    for layout in (torch.contiguous_format, torch.channels_last):
        with simulated(1) as machine:
            card = torch.device("cuda", 0)
            finish = DeviceTransform((0.5,) * 3, (0.5,) * 3, 8, True, card)
            there = inputs.contiguous(memory_format=layout).to(card)
            machine.waits.seen.clear()
            collected.append(finish.erase(there, boxes))
            assert dict(machine.waits.seen) == {} and machine.errors == []
            collected[-1] = collected[-1].cpu()
    collected.append(
        DeviceTransform(
            (0.5,) * 3,
            (0.5,) * 3,
            8,
            True,
            CPU,
        ).erase(inputs.clone(), boxes)
    )
    assert all(torch.equal(one, expected) for one in collected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixing_is_what_the_papers_say(layout):
    finish = DeviceTransform((0.5,) * 3, (0.5,) * 3, 6, True, CPU)
    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=layout)
    labels = torch.tensor([0, 1, 2, 2])
    box = np.array([[0, 0, 0, 0], [1, 1, 3, 2]])
    mix = sampling.Mix(
        np.float32([0.7, 1]),
        np.float32([0.7, 1 - 6 / 36]),
        box,
    )
    mixed = finish.mix(x, mix)
    soft = finish.mix_pairs(F.one_hot(labels, 4).float(), mix.label)
    assert torch.allclose(
        mixed[0],
        0.7 * x[0] + 0.3 * x[1],
        atol=1e-6,
    )
    assert torch.allclose(
        mixed[1],
        0.7 * x[1] + 0.3 * x[0],
        atol=1e-6,
    )
    cut = x[2].clone()
    cut[:, 1:4, 1:3] = x[3, :, 1:4, 1:3]
    assert torch.equal(mixed[2], cut)
    assert torch.allclose(
        soft,
        torch.tensor(
            [
                [0.7, 0.3, 0, 0],
                [0.3, 0.7, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 0],
            ]
        ),
    )


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_example_lies_in_memory_as_a_batch_does(channels, channels_last, rows):
    """Mixed or not: compiled code is compiled again for another stride, of a single channel too."""
    finish = DeviceTransform((0.5,) * channels, (0.5,) * channels, 6, channels_last, CPU)
    batch = finish.inputs(images(rows, channels, 6).permute(0, 2, 3, 1).contiguous())
    mixed = finish.mix(
        batch,
        sampling.Mix(
            np.float32([0.7, 1]),
            np.float32([0.7, 1]),
            np.zeros((2, 4), np.int64),
        ),
    )
    example = Example(rows, TensorSpec((channels, 6, 6), torch.float32)).batch(
        CPU, rows, channels_last
    )
    assert example.inputs.stride() == batch.stride() == mixed.stride()


@pytest.mark.parametrize("policy", ["trivial", "rand", "autoaugment"])
@pytest.mark.parametrize("shape", [(24, 40, 3), (8, 8, 1)])
def test_a_batch_is_augmented_as_its_images_alone(policy, shape):
    """Each operation gives the same bits, with far fewer kernels than images times operations."""
    pictures = torch.randint(0, 256, (160, *shape), dtype=torch.uint8)
    pictures[:60], pictures[60:70] = pictures[:60, :, :, :1], 7  # grey ones, and one colour
    index = np.arange(160)
    whole = pictures.clone()

    class Kernels(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), words=None):
            large = any(
                isinstance(one, torch.Tensor) and one.numel() >= pictures[0].numel()
                for one in arguments
            )
            self.count += large and not function.is_view
            return function(*arguments, **(words or {}))

    with torch.random.fork_rng(devices=[]), Kernels() as kernels:
        whole = Auto(AugmentRecipe(auto=policy), 0, 3, index).batch(whole)
    with torch.random.fork_rng(devices=[]):
        auto = Auto(AugmentRecipe(auto=policy), 0, 3, index)
        alone = [
            auto(row, image.permute(2, 0, 1)).permute(1, 2, 0) for row, image in enumerate(pictures)
        ]
    assert [row for row in range(160) if not torch.equal(whole[row], alone[row])] == []
    assert kernels.count < 2 * len(pictures)


@pytest.mark.parametrize(
    "words", [["data.name=digits"], ["data.name=synthetic", "data.image_size=32"]]
)
def test_a_batch_turned_back_is_the_images_it_was_made_of(words):
    recipe = load("digits", *words, "batch_size=32", "augment.crop=none", "augment.hflip=0")
    data = open_datasets(recipe)
    loader = Loader(data, recipe, create_task(recipe, data), DataShare(), CPU)
    batch = next(loader.evaluation())
    shown = as_pictures(data, batch.inputs)
    assert torch.equal(shown, data.val.images[: len(shown)].permute(0, 2, 3, 1))


def test_inputs_that_are_no_images_have_no_picture():
    data = open_datasets(load("digits"))
    plain = replace(data, plain=TensorSpec((5,), torch.float32))
    assert as_pictures(plain, torch.zeros(2, 5)) is None
    assert as_pictures(data, torch.empty(0)) is None, "a rank that reads no images"

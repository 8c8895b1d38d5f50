"""Batches copied to simulated GPUs: no race, no memory reused too early, and no wait."""

from unittest import mock

import numpy as np
import pytest
import torch

from tests.simulated.simcuda import simulated
from trainer.data import gpu_decoding
from trainer.data.feeds import ImageFeed, MemoryFeed, PhotoFeed, build_readers
from trainer.data.gpu_decoding import PhotoDecoder
from trainer.data.photos.copies import Copies, copy_to_device
from trainer.data.photos.decoding import open_encoded
from trainer.data.photos.jpeg import decode_jpeg, encode_jpeg
from trainer.data.sets import Datasets, ImageSet
from trainer.data.workers.worker_pool import InProcess
from trainer.errors import SetupError
from trainer.recipe import load

GPU = torch.device("cuda", 0)


class Pictures:
    def __len__(self):
        return 24

    def where(self, index):
        return str(index)

    def read(self, index, channels):
        return torch.full((channels, 16, 16), index, dtype=torch.uint8), index


class Jpegs(Pictures):
    """The same pictures, as files that a simulated GPU decodes."""

    def open(self, index, channels):
        data = encode_jpeg(10 * self.read(index, channels)[0], quality=95)
        return open_encoded(data.numpy(), channels), index


class BrokenJpegs(Jpegs):
    def open(self, index, channels):
        raise ValueError("broken on purpose")


def decode_on_gpu(data):
    return [copy_to_device(decode_jpeg(one, 3), GPU) for one in data]


def readers(source, recipe):
    """Return the reader of a training set in batches of four, in this process."""
    sets = Datasets(
        "mine",
        source,
        source,
        (),
        3,
        16,
        (0.5,) * 3,
        (0.5,) * 3,
        False,
        "",
    )
    return build_readers(sets, [sets.train], 4, recipe, 0, recipe.data.decode == "gpu")


def feed(kind, *words):
    recipe = load(None, "data.image_size=16", *words)
    pictures = torch.arange(24, dtype=torch.uint8)[:, None, None, None]
    labels = torch.arange(24)
    if kind == "labels":
        return MemoryFeed(None, labels, 24, 4, GPU)
    if kind == "photos":
        return PhotoFeed(readers(Pictures(), recipe), 0, GPU)
    if kind in ("jpegs", "broken jpegs"):
        source = Jpegs() if kind == "jpegs" else BrokenJpegs()
        recipe = load(None, "data.image_size=16", "data.decode=gpu")
        pool = readers(source, recipe)
        with mock.patch.object(
            gpu_decoding, "load_decoder", lambda device, channels: decode_on_gpu
        ):
            return PhotoFeed(pool, 0, GPU, PhotoDecoder(GPU, source, recipe, (16, 16, 3)))
    return ImageFeed(
        ImageSet(pictures.expand(-1, 3, 16, 16), labels),
        4,
        recipe.augment,
        0,
        GPU,
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("memory", ["augment.crop=pad", "augment.hflip=0.5"]),
        ("memory", ["augment.crop=resized"]),
        ("memory", ["augment.crop=pad", "augment.vflip=0.5", "augment.transforms=[RandomInvert]"]),
        *[("memory", [f"augment.auto={policy}"]) for policy in ("trivial", "rand", "autoaugment")],
        ("labels", []),
        ("photos", []),
        ("jpegs", []),
    ],
)
def test_batches_reach_a_gpu_in_order_and_without_waiting(kind, words):
    with simulated(1) as machine:
        batches = feed(kind, *words)
        machine.waits.seen.clear()
        seen = []
        for images, labels in batches.training(0, np.arange(24).reshape(6, 4)):
            seen.append(labels.clone())
            images.float().sum()
            labels = images = None
        assert dict(machine.waits.seen) == {}
        # A run evaluates images without augmentation, from another feed.
        evaluated = feed(kind) if words else batches
        machine.waits.seen.clear()
        for images, labels, _ in evaluated.evaluation([(0, 4), (20, 24)]):
            seen.append(labels.clone())
            images.float().sum()
        batches.close()
        assert dict(machine.waits.seen) == {}
        torch.cuda.synchronize()
        assert machine.errors == []
        assert torch.cat(seen).tolist() == [*range(24), *range(4), *range(20, 24)]


def test_jpegs_are_decoded_on_the_stream_of_the_copies():
    with simulated(1) as machine:
        batches = feed("jpegs").training(0, np.arange(24).reshape(6, 4))
        for images, labels in batches:
            # A step waits for the decoded images, without another copy.
            assert (images.sum((1, 2, 3)) / 768 - 10 * labels).abs().max() <= 2
        assert machine.errors == []


def test_a_photo_that_a_worker_cannot_read_is_named():
    with simulated(1), pytest.raises(SetupError, match="broken on purpose"):
        next(feed("broken jpegs").training(0, np.arange(24).reshape(6, 4)))


def test_a_step_does_not_wait_for_the_copy_of_the_next_batch():
    with simulated(1) as machine:
        copies = Copies(GPU)
        computing = torch.cuda.current_stream()
        first = copies.begin(torch.ones(4))
        second = copies.begin(torch.ones(4))
        first() + 1
        finished = computing.record_event()
        finished.synchronize()
        assert not copies._stream.record_event().query() and machine.errors == []
        assert (second() + 1).tolist() == [2.0] * 4
        assert machine.errors == []


class Ahead(InProcess):
    """Readers that have the next batch as soon as they are asked, and keep a list of requests."""

    def __init__(self, *args):
        super().__init__(*args)
        self.given = 0

    def read(self, keys):
        for filled in super().read(keys):
            self.given += 1
            yield filled

    def ready(self):
        return True


@pytest.mark.parametrize("broken", [None, 9])
def test_two_batches_are_in_flight_and_their_failures_are_their_own(broken):
    class Source(Pictures):
        def read(self, index, channels):
            if index == broken:
                raise ValueError("broken on purpose")
            return super().read(index, channels)

    with simulated(1) as machine:
        plain = readers(Source(), load(None, "data.image_size=16", "data.on_error=skip"))
        ahead = Ahead(plain.buffers, plain.readers)
        feed = PhotoFeed(ahead, 0, GPU)
        seen = []
        for n, (images, labels) in enumerate(feed.training(0, np.arange(24).reshape(6, 4))):
            assert ahead.given == min(6, n + 2)
            # The message comes with the batch that contains the photo.
            assert len(feed.failures) == (broken is not None and n >= 2)
            seen.append(labels.clone())
            images.float().sum()
            del images, labels
        torch.cuda.synchronize()
        assert machine.errors == [] and len(feed.failures) == (broken is not None)
        assert torch.cat(seen).tolist() == [n + (n == broken) for n in range(24)]

"""A worker decodes while the device computes, has the pixels of evaluation, and replays captured
passes.
"""

import threading
import time

import pytest
import torch
from PIL import Image
from torch import nn

from tests.data.photo_folders import exif, scene
from tests.simulated.tape import graphs_on_the_cpu
from trainer.commands.predict import sources
from trainer.commands.predict.labelling import Labeller, Preparation
from trainer.data import DataShare, Loader, open_datasets
from trainer.data.folders.layout import Before
from trainer.recipe import load
from trainer.tasks import Classification


class Means(nn.Module):
    """Ten classes."""

    def __init__(self):
        super().__init__()
        self.head, self.drop = nn.Linear(3 * 8 * 8, 10), nn.Dropout(0.5)

    def forward(self, images):
        return self.head(self.drop(images.flatten(1)))


def labeller(*words, threads=0):
    torch.manual_seed(0)
    preparation = Preparation(8, 8, 3, (0.5,) * 3, (0.25,) * 3)
    task = Classification(load(None), ())
    actual = Labeller(Means(), preparation, load(None, *words), task, None, threads)
    actual.setup(torch.device("cpu"))
    return actual


def test_decoding_in_threads_labels_alike(own_threads, photos):
    """Threads keep the order, and return a reason for each damaged image."""
    paths = [str(path) for path in sorted(photos.rglob("*.*")) if path.suffix in (".png", ".jpg")]
    one = labeller()
    four = labeller(threads=4)
    alone = one.batch(paths * 2)
    beside = four.batch(four.prepare(paths * 2))
    bad = ("empty.png", "text.jpg", "truncated.jpg")
    assert alone == beside
    assert [bool(row.error) for row in alone] == [path.endswith(bad) for path in paths * 2]


def test_the_next_batch_is_read_while_the_model_has_this_one(own_threads, monkeypatch, photos):
    """One thread reads the next batch, even if it reads items of a user's own data set."""
    paths = sorted(map(str, (photos / "0").glob("*.png")))
    for source, items in ((None, paths), (Numbered(), list(range(20)))):
        worker = labeller(threads=1)
        read = threading.Event()
        worker.source = source
        first = worker.prepare(items[:10])
        forward = worker.model.forward

        def waiting(images, forward=forward, worker=worker, read=read, items=items):
            if len(images) == 10:
                worker.prepare(items[10:])[-1].add_done_callback(lambda _: read.set())
                assert read.wait(20), "nobody reads"
            return forward(images)

        monkeypatch.setattr(worker.model, "forward", waiting)
        assert not any(row.error for row in worker.batch(first))


class Numbered:
    """A user's data set that allows one reader at a time."""

    def __init__(self):
        self.reading = threading.Lock()

    def read(self, index, channels):
        assert self.reading.acquire(blocking=False), "two are read at once"
        time.sleep(0.001)
        self.reading.release()
        return torch.full((3, 8, 8), index, dtype=torch.uint8), 0


def test_items_of_a_users_data_set_are_read_one_at_a_time(own_threads):
    worker = labeller(threads=4)
    worker.source = Numbered()
    worker.setup(torch.device("cpu"))
    assert not any(row.error for row in worker.batch(worker.prepare(list(range(20)))))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Photos of every kind that has a way of its own to pixels, large and as small as a model's
    images.
    """
    root = tmp_path_factory.mktemp("kinds")
    for name in ("a", "b"):
        folder = root / name
        folder.mkdir()
        large = Image.fromarray(scene(530, 701) if name == "a" else 255 - scene(530, 701))
        for orientation in (1, 3, 6):
            large.save(folder / f"turned-{orientation}.jpg", exif=exif(orientation), quality=95)
        large.convert("L").save(folder / "gray.jpg")
        large.convert("CMYK").save(folder / "cmyk.jpg")
        large.save(folder / "progressive.jpg", progressive=True)
        large.save(folder / "large.png")
        large.resize((400, 300)).save(folder / "middle.jpg")
        for side in (32, 80):
            large.resize((side, side)).save(folder / f"{side}.jpg")
            large.resize((side, side)).save(folder / f"{side}.png")
    return root


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [32, 80])
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_a_photo_has_the_pixels_of_its_evaluation(own_threads, kinds, crop, size, channels):
    """A photo has the same pixels to the last bit from memory, from a loader, from the validation
    split and from a file.
    """
    words = [
        f"data.root={kinds}",
        f"data.image_size={size}",
        f"data.channels={channels}",
        f"augment.crop={crop}",
    ]
    recipe = load(
        None, *words, "data.name=imagefolder", "data.workers=0", "batch_size=4", "model.name=cnn"
    )
    # All images belong to the validation split.
    data = open_datasets(recipe, Before(None, elsewhere=True))
    task = Classification(recipe, data.classes)
    loader = Loader(data, recipe, task, DataShare(), torch.device("cpu"))
    evaluated = torch.cat([batch.inputs[: batch.count] for batch in loader.evaluation()])
    loader.close()
    listed = sources.open_split(data, "val")
    worker = Labeller(
        nn.Identity(),
        Preparation.of(data),
        recipe,
        task,
        listed.source,
    )
    worker.setup(torch.device("cpu"))
    held_out = list(listed.items)
    assert len(held_out) == len(evaluated) == 24
    for row, item in enumerate(held_out):
        for payload in (item.payload, item.path):
            pixels = worker._read(payload).permute(1, 2, 0)[None].contiguous()
            assert torch.equal(worker._transform.inputs(pixels)[0], evaluated[row]), item.path


@pytest.mark.parametrize("word", ["graphs=auto", "precision=bf16", "graphs=false"])
def test_batches_of_one_size_are_replayed(own_threads, word, capfd):
    """Labels equal those of eager passes to the bit; a batch of another size runs eagerly."""
    with graphs_on_the_cpu() as recorders:
        precision = [word] * word.startswith("precision")
        workers = [labeller(word), labeller("graphs=false", *precision)]
        rows = torch.randint(
            0,
            256,
            (200, 3, 8, 8),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(3),
        )
        for start in [*range(0, 72, 4), 73, *range(80, 120, 4)]:
            items = [*rows[start : start + (3 if start == 73 else 4)]]
            replayed, launched = (worker.batch(items) for worker in workers)
            assert replayed == launched
    if word == "graphs=false":
        assert recorders == []
    else:
        assert len(recorders) == 1
        assert recorders[0].replays > 10
        assert capfd.readouterr().err == ""

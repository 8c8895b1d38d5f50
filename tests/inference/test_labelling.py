"""A worker: decoding beside the device, passes of one size where it compiles."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from trainer.data.pictures import Picture
from trainer.inference import labelling
from trainer.inference.labelling import Labeller, Preparation
from trainer.recipe import load
from trainer.tasks import Classification


class Seen(nn.Module):
    """Ten classes; remembers the shapes that it was given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)
        self.shapes = []

    def forward(self, images):
        if not torch.compiler.is_compiling():
            self.shapes.append(tuple(images.shape))
        return self.head(images.flatten(1))


def labeller(*words, threads=1):
    torch.manual_seed(0)
    found = Labeller(
        Seen(),
        Preparation(8, 3, (0.5,) * 3, (0.25,) * 3),
        load(None, *words),
        Classification(load(None), ()),
        None,
        threads,
    )
    found.setup(torch.device("cpu"))
    return found


@pytest.fixture
def own_threads():
    """A worker sets its process's threads and warnings."""
    before = torch.get_num_threads()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(before)


def test_decoding_in_threads_labels_alike_and_in_pieces(own_threads, photos):
    """In order, bad ones with their reasons; the model begins with a quarter of the batch."""
    paths = [str(path) for path in sorted(photos.rglob("*.*")) if path.suffix in (".png", ".jpg")]
    one, four = labeller(), labeller(threads=4)
    alone, beside = one.batch(paths * 2), four.batch(paths * 2)
    assert [row.classes for row in alone] == [row.classes for row in beside]
    assert [row.error for row in alone] == [row.error for row in beside] and any(row.error for row in alone)
    assert [row.probabilities for row in beside] == [pytest.approx(row.probabilities, abs=1e-6) for row in alone]
    whole = 2 * sum(not row.error for row in one.batch(paths))
    rows = -(-len(paths) * 2 // 4)
    assert [shape[0] for shape in four.model.shapes] == [rows] * (whole // rows) + [whole % rows]


def test_files_are_decoded_at_the_same_time(own_threads, monkeypatch):
    together = threading.Barrier(4, timeout=20)

    def read(path, channels):
        together.wait()
        return Picture.of(torch.full((3, 8, 8), int(path), dtype=torch.uint8))

    monkeypatch.setattr(labelling, "open_image", read)
    assert not any(row.error for row in labeller(threads=4).batch(list("01234567")))


def test_compiling_is_done_before_an_image_is_waited_for(own_threads, monkeypatch, photos):
    """Once, for all sizes of batches."""
    compiled = []

    def backend(graph, inputs):
        compiled.append([tuple(tensor.shape) for tensor in inputs])
        return graph.forward

    compile_with = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **words: compile_with(self, backend=backend, **words))
    torch._dynamo.reset()
    worker, plain = labeller("compile=true", "predict.batch_size=8"), labeller()
    assert len(compiled) == 1 and (8, 3, 8, 8) in compiled[0]
    paths = sorted(str(path) for path in (photos / "0").glob("*.png"))
    for count in (1, 3, 8, 11, 20):
        mine, theirs = worker.batch(paths[:count]), plain.batch(paths[:count])
        assert [row.classes for row in mine] == [row.classes for row in theirs]
        for row, other in zip(mine, theirs, strict=True):
            assert row.probabilities == pytest.approx(other.probabilities, abs=1e-6)
    assert len(compiled) == 1

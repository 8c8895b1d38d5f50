"""data.balance=true: classes drawn equally often, the same images in every mode, and continued like
any other order.
"""

import shutil

import numpy as np
import pytest
import torch

from tests.command_line import QUIET, losses, ok
from tests.data.loading import epoch
from tests.data.photo_folders import coloured
from trainer.data import open_datasets
from trainer.errors import RecipeError
from trainer.recipe import load


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """20 blue images, 4 red ones; 5 of each held out."""
    root = tmp_path_factory.mktemp("rare")
    for part, counts in (("train", (20, 4)), ("val", (5, 5))):
        for name, colour, count in zip(
            ("blue", "red"), ((0, 0, 160), (160, 0, 0)), counts, strict=True
        ):
            for number in range(count):
                coloured(root / part / name / f"{number}.png", colour, (16, 16), number)
    return root


def drawn(loading, *words):
    """Targets and inputs of an epoch."""
    inputs, targets = zip(*epoch(loading(open_datasets(load(None, *words)), *words)), strict=True)
    return torch.cat(targets), torch.cat(inputs)


@pytest.mark.parametrize(
    "words",
    [[], ["augment.crop=resized", "data.workers=0"], ["augment.crop=resized", "data.workers=2"]],
)
def test_rare_classes_come_as_often(loading, rare, words):
    plain = [
        "data.name=imagefolder",
        f"data.root={rare}",
        "batch_size=8",
        "augment.hflip=0.5",
        *words,
    ]
    targets, _ = drawn(loading, *plain)
    assert np.bincount(targets).tolist() == [20, 4]
    targets, inputs = drawn(loading, *plain, "data.balance=true")
    assert np.bincount(targets).tolist() == [12, 12]
    red = inputs[targets == 1].flatten(1)
    assert len(torch.unique(red, dim=0)) > 4  # A repeated image is augmented again.


@pytest.mark.slow
def test_the_same_in_every_mode_and_after_a_stop(rare, tmp_path):
    words = [
        "model.name=cnn_gn",
        "data.name=imagefolder",
        f"data.root={rare}",
        "data.balance=true",
        "batch_size=8",
    ]
    words += ["epochs=2", "optimizer.lr=0.01", "threads=1", *QUIET]
    ok(*words, "mode=single", f"output={tmp_path / 'single'}")
    expected = losses(tmp_path / "single")
    for name, mode in {
        "ddp": ["mode=ddp", "nproc=2"],
        "split": ["mode=split", "devices=[cpu,cpu]"],
    }.items():
        ok(*words, *mode, f"output={tmp_path / name}")
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-4)
    shutil.rmtree(tmp_path / "single" / "checkpoints" / "step-00000006")
    ok(*words, "mode=single", f"output={tmp_path / 'single'}", "resume=auto")
    assert losses(tmp_path / "single") == expected


def test_balancing_without_classes_is_refused():
    with pytest.raises(RecipeError, match=r"data\.balance=true and loss\.class_weights=balanced"):
        load(None, "data.balance=true", "loss.class_weights=balanced")
    with pytest.raises(
        RecipeError, match=r"^data\.balance=true .*\bdata\.name=digits\b.*\bone class\b"
    ):
        open_datasets(load(None, "data.balance=true", "task.name=multilabel"))

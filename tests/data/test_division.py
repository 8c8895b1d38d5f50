"""data.fold and data.fraction: as even as scikit-learn's folds and a plain loop, the same images in
every mode, and a run is evaluated on its own fold.
"""

import csv
import shutil

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedKFold
from sklearn.utils.class_weight import compute_class_weight
from torch.utils.data import Subset, TensorDataset

import trainer
from tests.checks import refusal
from tests.command_line import QUIET, losses, ok, result
from tests.data import photo_folders
from tests.data.archives.making import in_folders, tarred
from tests.data.archives.making import opened as opened_shards
from tests.data.loading import Items, opened
from trainer.commands.evaluate import evaluate_run
from trainer.data import open_datasets
from trainer.data.folders.layout import Before
from trainer.recipe import load, notes_on_idle
from trainer.recipe.mode_table import TRAITS
from trainer.training.setup import create_task

FIVE = [f"{number}/5" for number in range(1, 6)]
MLP = ["recipe=digits", "model.name=mlp", "epochs=1", *QUIET]


def digits(*words):
    return open_datasets(load("digits", *words))


def images_of(part):
    """Return the bytes of each image. No two digits have the same ones and other labels."""
    return [image.numpy().tobytes() for image in part.images]


def pair(counts, shape=(1, 6, 6)):
    """Distinct images, `counts[n]` of class n, in mixed order."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    rows = torch.arange(len(labels))[:, None, None, None]
    return (rows % 250 + torch.zeros(1, *shape)).byte(), torch.from_numpy(labels)


# --- which images
# ---------------------------------------------------------------------------------------------


def test_folds_are_as_even_as_those_of_scikit_learn():
    whole = digits()
    everything = sorted(images_of(whole.train))
    held_out = []
    counts = []
    for fold in FIVE:
        part = digits(f"data.fold={fold}")
        assert sorted(images_of(part.train) + images_of(part.val)) == everything
        held_out += images_of(part.val)
        counts.append(np.bincount(part.val.labels, minlength=10))
    assert sorted(held_out) == everything
    labels = whole.train.labels.numpy()
    theirs = [
        np.bincount(labels[rows], minlength=10)
        for _, rows in StratifiedKFold(5, shuffle=True, random_state=0).split(labels, labels)
    ]
    assert sorted(np.sum(counts, 1)) == sorted(np.sum(theirs, 1))
    for mine, other in zip(np.transpose(counts), np.transpose(theirs), strict=True):
        assert sorted(mine) == sorted(other)
    assert images_of(digits("data.fold=1/5", "seed=1").val) != images_of(
        digits("data.fold=1/5").val
    )


def test_a_fraction_keeps_the_share_of_each_class_and_is_part_of_a_larger_one():
    train = pair([40, 25, 3, 1])
    smaller = set()
    for fraction in (0.001, 0.1, 0.2, 0.5, 1.0):
        datasets = opened((train, pair([2] * 4), 4), f"data.fraction={fraction}")
        expected = []
        for label in range(4):
            size = sum(int(one) == label for one in train[1])
            expected.append(max(1, round(fraction * size)))
        assert np.bincount(datasets.train.labels).tolist() == expected
        kept = {*images_of(datasets.train)}
        assert smaller <= kept and len(datasets.val) == 8
        smaller = kept
    assert len(smaller) == 69


def test_a_fraction_is_taken_of_what_the_fold_trains_on():
    fold = digits("data.fold=2/5")
    both = digits("data.fold=2/5", "data.fraction=0.1")
    assert images_of(both.val) == images_of(fold.val)
    assert {*images_of(both.train)} < {*images_of(fold.train)}
    for label, count in enumerate(np.bincount(fold.train.labels)):
        assert (both.train.labels == label).sum() == round(0.1 * count)


def test_targets_without_classes_are_drawn_as_a_whole():
    inputs = torch.arange(50.0)[:, None]
    for words in (["task.name=regression"], ["task.name=multilabel"]):
        data = ((inputs, (inputs > 48).float()), (inputs[:3], torch.zeros(3, 1)), 1)
        assert len(opened(data, *words, "data.fraction=0.1").train) == 5
        folds = [opened(data, *words, f"data.fold={n}/3").val for n in (1, 2, 3)]
        assert sorted(map(len, folds)) == [16, 17, 17]
        assert sorted(torch.cat([fold.inputs for fold in folds]).flatten().tolist()) == [*range(50)]


def test_classes_are_weighted_by_the_images_that_train():
    words = ["data.fraction=0.3", "loss.class_weights=balanced"]
    datasets = opened(
        (pair([40, 25, 3]), pair([2] * 3), 3),
        *words,
    )
    labels = datasets.train.labels.numpy()
    assert len(labels) == 12 + 8 + 1
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    weights = create_task(load(None, *words), datasets).weights(torch.device("cpu"))
    assert weights.tolist() == pytest.approx(expected.tolist())


def test_pixels_are_measured_over_the_images_that_train():
    train = pair([30, 30])
    measured = opened((train, pair([2, 2]), 2), "data.fold=1/2")
    pixels = measured.train.images.double() / 255
    assert measured.mean == pytest.approx((pixels.mean().item(),))
    assert measured.std == pytest.approx((pixels.std().item(),))


@pytest.mark.parametrize("split", [False, True])
def test_photos_have_folds_with_and_without_a_split(tmp_path, split):
    photo_folders.photo_set(tmp_path, {"cat": 10, "dog": 7}, split)
    names = []
    for fold in ("1/3", "2/3", "3/3"):
        datasets = photo_folders.opened(tmp_path, f"data.fold={fold}")
        held_out = {*photo_folders.names_of(datasets.val)}
        assert held_out.isdisjoint(photo_folders.names_of(datasets.train))
        assert len(datasets.train) + len(datasets.val) == 17
        counts = np.bincount(datasets.val.labels)
        assert counts[0] in (3, 4) and counts[1] in (2, 3)
        names += held_out
        assert ("17 images unused" in datasets.holdout) == split
        table = [*csv.DictReader(datasets.holdout_table().splitlines())]
        assert {row["file"] for row in table if row["split"] == "val"} == held_out
    assert len({*names}) == len(names) == 17


def test_photos_are_drawn_by_their_names_only(tmp_path):
    photo_folders.photo_set(tmp_path, {"cat": 20, "dog": 20}, split=True)
    first = {*photo_folders.names_of(photo_folders.opened(tmp_path, "data.fraction=0.2").train)}
    assert len(first) == 8
    photo_folders.photo_set(tmp_path, {"emu": 20}, split=True)
    again = photo_folders.opened(tmp_path, "data.fraction=0.2")
    assert len(again.val) == 60
    assert {name for name in photo_folders.names_of(again.train) if "emu" not in name} == first


def test_the_fold_of_a_run_is_found_again(tmp_path):
    """Its photos may have moved, and others may replace them."""
    photo_folders.photo_set(tmp_path / "a", {"cat": 10, "dog": 10}, split=True)
    fold = "data.fold=1/5"
    held_out = photo_folders.names_of(photo_folders.opened(tmp_path / "a", fold).val)
    recorded = Before(frozenset(held_out), elsewhere=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for before in (recorded, Before(None, elsewhere=True)):
        moved = photo_folders.opened(tmp_path / "b", fold, before=before)
        assert photo_folders.names_of(moved.val) == held_out
    photo_folders.photo_set(tmp_path / "c", {"cat": 3, "dog": 3}, True, suffix="png")
    others = photo_folders.opened(tmp_path / "c", fold, before=recorded)
    assert others.val.root == str(tmp_path / "c" / "val") and len(others.val) == 6
    photo_folders.photo_set(
        tmp_path / "a",
        {"cat": 2, "dog": 2},
        True,
        parts=("test",),
    )
    test = photo_folders.opened(tmp_path / "a", fold, before=Before(test=True))
    assert test.val.root == str(tmp_path / "a" / "test")


def test_shards_have_folds_and_fractions(tmp_path):
    tarred(tmp_path / "train.tar", in_folders({"cat": 9, "dog": 6}))
    tarred(tmp_path / "val.tar", in_folders({"cat": 2, "dog": 2}))
    datasets = opened_shards(tmp_path, "data.fold=1/3", "data.fraction=0.5")
    assert np.bincount(datasets.val.labels).tolist() == [3, 2]
    assert np.bincount(datasets.train.labels).tolist() == [3, 2]
    assert "4 images unused" in datasets.holdout


class Listed(Items):
    """Items that list their classes, each of which is the item's number modulo 3."""

    targets = torch.arange(30) % 3

    def __getitem__(self, index):
        return super().__getitem__(index)[0], index % 3


def test_items_are_counted_if_they_list_their_classes():
    for items, expected in ((Listed(30), [*range(30)]), (Subset(Listed(30), [5, 8, 9]), [5, 8, 9])):
        train = opened((items, Items(4), 3), "data.fraction=0.4").train
        numbers = [int(train.where(index).split()[-1]) for index in range(len(train))]
        base = [expected[number] for number in numbers]
        assert np.bincount([number % 3 for number in base], minlength=3).tolist() == (
            [4, 4, 4] if len(expected) == 30 else [1, 0, 1]
        )
        for index, number in enumerate(base):
            pixels, label = train.read(index, 3)
            assert torch.equal(pixels, Listed(30)[number][0]) and label == number % 3


# --- whole runs
# ---------------------------------------------------------------------------------------------


def test_a_run_equals_one_on_sets_that_were_divided_by_hand(tmp_path):
    sets = pair([60, 40, 30]), pair([4, 4, 4])
    words = ["model.name=mlp", "batch_size=16", "epochs=2", "mode=single", "threads=1", *QUIET]
    divided = opened((*sets, 3), "data.fold=2/3", "data.fraction=0.5")
    by_hand = [(part.images, part.labels) for part in (divided.train, divided.val)]
    trainer.train(
        "digits",
        *words,
        data=(*by_hand, 3),
        output=str(tmp_path / "hand"),
    )
    words += ["data.fold=2/3", "data.fraction=0.5"]
    own = trainer.train(
        "digits",
        *words,
        data=(*sets, 3),
        output=str(tmp_path / "own"),
    )
    assert losses(tmp_path / "own") == losses(tmp_path / "hand")
    assert own["val_loss"] == result(tmp_path / "hand")["val_loss"]
    assert own["data"]["train_samples"] == len(divided.train)


@pytest.mark.slow
def test_a_run_is_evaluated_on_its_own_fold(tmp_path):
    run = tmp_path / "run"
    ok(*MLP, "data.fold=2/5", "data.fraction=0.3", f"output={run}", "mode=single")
    expected = result(run)
    assert expected["data"]["val_samples"] == len(digits("data.fold=2/5").val)
    assert "360 images unused" in expected["facts"]["held out"]
    # Another seed would draw images of the fold that the run trained on.
    for words in ([], ["seed=7"]):
        figures = evaluate_run(run, *words)
        assert figures["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
        assert figures["val_samples"] == expected["data"]["val_samples"]
    shutil.copy(run / "last.safetensors", tmp_path / "alone.safetensors")
    alone = evaluate_run(tmp_path / "alone.safetensors")
    assert alone["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert evaluate_run(run, "split=test")["test_samples"] == 360
    for word in ("data.fold=1/5", "data.fold=null", "data.fraction=0.5"):
        assert word.partition("=")[0] in refusal(evaluate_run, run, word)
        assert word.partition("=")[0] in refusal(
            trainer.train, run, word, "resume=auto", output=str(run)
        )


@pytest.mark.full(but=["ddp", "pipeline"])
@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode, traits in TRAITS.items() if traits.same_maths])
def test_every_mode_trains_on_the_same_images_and_resumes(mode, tmp_path):
    words = ["recipe=digits", "model.name=cnn_gn", "optimizer.lr=0.01", "batch_size=32", *QUIET]
    words += ["data.fold=1/3", "data.fraction=0.2", "epochs=2", "threads=1", "save.every_steps=1"]
    where = {"single": [], "ddp": ["nproc=2"], "fsdp": ["nproc=2"]}.get(
        mode,
        ["devices=[cpu,cpu]"],
    )
    ok(*words, "mode=single", f"output={tmp_path / 'single'}")
    run = tmp_path / "run"
    ok(*words, f"mode={mode}", *where, f"output={run}", "save.keep=20")
    assert losses(run) == pytest.approx(losses(tmp_path / "single"), rel=1e-4)
    assert result(run)["data"] == result(tmp_path / "single")["data"]
    expected = losses(run)
    for folder in sorted((run / "checkpoints").glob("step-*"))[3:]:
        shutil.rmtree(folder)
    ok(*words, f"mode={mode}", *where, f"output={run}", "save.keep=20", "resume=auto")
    assert losses(run) == expected


# --- what is refused or reported
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        *(f"data.fold={value}" for value in ("0/5", "6/5", "1/1", "1", "-1/5", "1/5/5", "a/b", "")),
        *(f"data.fraction={value}" for value in ("0", "1.5", "-0.1", "nan", "half")),
    ],
)
def test_other_values_are_refused(word):
    assert word.partition("=")[0] in refusal(load, "digits", word)


def test_a_class_needs_an_image_in_each_fold():
    text = refusal(
        opened,
        (pair([9, 3]), pair([2, 2]), 2),
        "data.fold=1/5",
    )
    assert "has 3" in text and "data.fold=1/3" in text
    opened(
        (pair([9, 3]), pair([2, 2]), 2),
        "data.fold=1/3",
    )
    assert "two or more" in refusal(opened, (pair([9, 1]), pair([2, 2]), 2), "data.fold=1/2")


def test_too_few_images_for_a_batch_are_refused(tmp_path):
    words = ["digits", "data.fraction=0.02", "mode=single", f"output={tmp_path / 'run'}"]
    assert "batch_size=30" in refusal(trainer.train, *words)


def test_items_that_cannot_be_divided_are_refused():
    assert "targets" in refusal(opened, (Items(30), Items(4), 100), "data.fraction=0.5")
    assert "data.fold=1/5" in refusal(opened, (Listed(30), Items(4), 100), "data.fold=1/5")
    tensors = TensorDataset(torch.zeros(30, 2), torch.arange(30) % 3)
    assert len(opened((tensors, tensors, 3), "data.fold=1/5").val) == 6


def test_keys_without_effect_are_reported():
    (line,) = notes_on_idle(None, "data.name=imagefolder", "data.fold=1/5", "data.val_fraction=0.5")
    assert line.startswith("data.val_fraction=0.5 ") and "data.fold=1/5" in line
    assert notes_on_idle(None, "data.name=imagefolder", "data.val_fraction=0.5") == []

"""Samples known again by their numbers, wherever they lie and however they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from tests.data.photo_folders import opened, photo_set
from trainer.data import ImageSet, open_datasets
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.data.registered import registered
from trainer.recipe import load
from trainer.training.same_images import contents_of, difference


def keys(root, *words):
    return contents_of(opened(root, *words))


def test_photos_are_their_paths_below_the_root(tmp_path):
    words = ("data.image_size=32",)
    before = keys(photo_set(tmp_path / "a", {"ant": 5, "bee": 5}), *words)
    (tmp_path / "a").rename(tmp_path / "b")
    assert all(torch.equal(before[part], keys(tmp_path / "b", *words)[part]) for part in before)
    (tmp_path / "b" / "ant" / "0.jpg").rename(tmp_path / "b" / "bee" / "moved.jpg")
    (tmp_path / "b" / "bee" / "1.jpg").unlink()
    after = keys(tmp_path / "b", *words)
    both = [torch.cat([found["train"], found["val"]]) for found in (before, after)]
    assert difference(*both) == "1 added, 2 removed"


def test_tiny_photos_that_are_kept_decoded_are_their_paths_too(tmp_path):
    root = photo_set(tmp_path / "a", {"ant": 5, "bee": 5}, suffix="png")
    tiny = open_datasets(load(None, "data.name=imagefolder", f"data.root={root}", "data.image_size=16"))
    assert isinstance(tiny.train, ImageSet)
    assert all(torch.equal(keys(root)[part], found) for part, found in contents_of(tiny).items())


def test_a_table_s_labels_count(tmp_path):
    root = photo_set(tmp_path / "a", {"x": 8})
    lines = [f"x/{number}.jpg,{'ant' if number % 2 else 'bee'}" for number in range(8)]

    def found(lines):
        (tmp_path / "t.csv").write_text("\n".join(["file,class", *lines]))
        return torch.cat([*keys(root, f"data.labels={tmp_path / 't.csv'}").values()])

    before = found(lines)
    assert difference(before, found([lines[0].replace("bee", "ant"), *lines[1:]])) == "1 added, 1 removed"
    assert difference(before, found(lines[::-1])) == "in another order"
    assert difference(before, found(lines)) == ""


def made(*parts):
    with registered.lent("mine", lambda data: (*parts, ["a", "b"])):
        return contents_of(open_datasets(load(None, "data.name=mine")))


def test_what_lies_in_memory_is_its_values():
    images, labels = torch.randint(0, 256, (12, 3, 40, 40), dtype=torch.uint8), torch.arange(12) % 2
    before = made((images, labels), (images[:4], labels[:4]))
    assert torch.equal(before["train"][:4], before["val"])
    assert len(before["train"].unique()) == 12
    other = labels.clone()
    other[3] = 0
    assert difference(before["train"], made((images, other), (images[:4], labels[:4]))["train"]) == "1 added, 1 removed"
    floats = made((images.float(), labels), (images[:4].float(), labels[:4]))
    assert len(floats["train"].unique()) == 12


class Items(Dataset):
    """As torchvision's folders are: paths and classes beside the items."""

    def __init__(self, samples, root="/somewhere"):
        self.root, self.samples, self.targets = root, samples, [label for _, label in samples]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), self.samples[index][1]


def test_a_user_s_items_are_what_they_list():
    def items(root, names="0123456789"):
        return Items([(f"{root}/{name}.png", int(name) % 2) for name in names], root)

    before = made(items("/a"), Subset(items("/a"), [1, 2]))
    assert torch.equal(before["train"][1:3], before["val"])
    assert torch.equal(before["train"], made(items("/b"), items("/b"))["train"])
    assert difference(before["train"], made(items("/a", "012345679"), items("/a"))["train"]) == "0 added, 1 removed"
    twice = made(ConcatDataset([items("/a"), items("/a")]), items("/a"))["train"]
    assert difference(before["train"], twice) == "10 added, 0 removed"


def test_items_that_list_nothing_are_counted():
    parts = [[(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * count for count in (9, 7, 5)]
    before = made(parts[0], parts[2])
    assert difference(before["train"], made(parts[1], parts[2])["train"]) == "0 added, 2 removed"


def test_many_names_have_numbers_of_their_own():
    names = [f"n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG" for number in range(200_000)]
    photos = PhotoFolder(Path("/anywhere"), names, np.arange(len(names)) % 1000)
    found = replace(opened_nothing(), train=photos, val=photos)
    assert len(contents_of(found)["train"].unique()) == len(names)


def opened_nothing():
    return open_datasets(load(None, "data.name=synthetic"))

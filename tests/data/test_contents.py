"""A run recognizes its images wherever and however they are stored, and notices other images."""

import torch
from torch.utils.data import Dataset, Subset

from tests.data.photo_folders import opened, photo_set
from trainer.data import ImageSet, open_datasets
from trainer.data.registered import registered
from trainer.recipe import load
from trainer.training.same_images import hash_contents


def found(data):
    """Samples, hash and sizes of both parts."""
    return {role: tensor.tolist() for role, tensor in hash_contents(data).items()}


def test_photos_are_their_paths_below_the_root_their_classes_and_sizes(tmp_path):
    before = found(
        opened(
            photo_set(
                tmp_path / "a",
                {"ant": 5, "bee": 5},
                suffix="png",
            )
        )
    )
    (tmp_path / "a").rename(tmp_path / "b")
    assert found(opened(tmp_path / "b")) == before
    tiny = open_datasets(
        load(None, "data.name=imagefolder", f"data.root={tmp_path / 'b'}", "data.image_size=16")
    )
    assert isinstance(tiny.train, ImageSet) and found(tiny) == before
    (tmp_path / "b" / "ant" / "0.png").rename(tmp_path / "b" / "ant" / "moved.png")
    assert found(opened(tmp_path / "b")) != before


def test_a_table_s_labels_and_order_count(tmp_path):
    root = photo_set(tmp_path / "a", {"x": 8})
    lines = [f"x/{number}.jpg,{'ant' if number % 2 else 'bee'}" for number in range(8)]

    def told(lines):
        (tmp_path / "t.csv").write_text("\n".join(["file,class", *lines]))
        return found(opened(root, f"data.labels={tmp_path / 't.csv'}"))

    assert told(lines) == told(lines)
    assert (
        len(
            {
                str(told(each))
                for each in (lines, [lines[0].replace("bee", "ant"), *lines[1:]], lines[::-1])
            }
        )
        == 3
    )


def made(*parts):
    with registered.lent("mine", lambda data: (*parts, ["a", "b"])):
        return found(open_datasets(load(None, "data.name=mine")))


def test_images_in_memory_are_identified_by_their_values():
    images = torch.randint(
        0,
        256,
        (12, 3, 40, 40),
        dtype=torch.uint8,
    )
    labels = torch.arange(12) % 2
    kept = images[:4], labels[:4]
    other = labels.clone()
    brighter = images.clone()
    other[3] = 0
    brighter[5] //= 2
    sets = [
        (images, labels),
        (images, other),
        (brighter, labels),
        (images.float(), labels),
        (images[:11], labels[:11]),
    ]
    messages = [made(part, (kept[0].to(part[0].dtype), kept[1]))["train_images"] for part in sets]
    assert len({*map(str, messages)}) == 5
    assert made(sets[0], kept)["train_images"] == messages[0]


class Items(Dataset):
    """Items with paths and classes, like a folder of torchvision."""

    def __init__(self, root, names="0123456789"):
        self.root, self.samples = root, [(f"{root}/{name}.png", int(name) % 2) for name in names]
        self.targets = [label for _, label in self.samples]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), self.samples[index][1]


def test_a_user_s_items_are_what_they_list_and_others_are_counted():
    kept = Subset(Items("/a"), [1, 2])
    before = made(Items("/a"), kept)
    assert made(Items("/b"), kept) == before
    for names in ("0123456798", "2123456789", "012345678"):  # labels; a path; fewer
        assert made(Items("/a", names), kept)["train_images"] != before["train_images"]
    plain = [[(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * count for count in (9, 7)]
    assert made(plain[0], kept)["train_images"][:1] == [9]
    assert made(plain[1], kept)["train_images"][:1] == [7]

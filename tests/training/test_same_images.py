"""Ranks that found other images say so before the first step, and a run goes on with the classes that it began with."""

import re

import pytest

from tests.command_line import QUIET, ok, trainer
from tests.data.photo_folders import coloured, opened, photo, photo_set
from tests.worlds import on_ranks
from trainer.data.folders.layout import Before
from trainer.errors import SetupError
from trainer.training.same_images import check_same_images

PETS = {"cat": 10, "dog": 10}


def errors(*data):
    """What each rank raises that found its part of `data`."""

    def work(world):
        try:
            check_same_images(world, data[world.rank])
        except SetupError as error:
            return str(error)
        return None

    return on_ranks(len(data), work)


def test_other_images_are_told_on_every_rank(tmp_path):
    here = opened(photo_set(tmp_path / "here", PETS))
    photo(photo_set(tmp_path / "there", PETS) / "cat" / "new.jpg")
    told = errors(here, here, opened(tmp_path / "there"))
    assert len(set(told)) == 1
    assert "rank 2 on " in told[0] and "(training images: 17 there, 16 here)" in told[0] and "split.csv" in told[0]
    (told, _) = errors(here, opened(tmp_path / "here", "data.image_size=32"))
    assert "(shape: 3 x 32 x 32 there, 3 x 224 x 224 here)" in told


@pytest.mark.parametrize("other", ["held out", "renamed"])
def test_as_many_images_that_are_others_are_told(tmp_path, other):
    here, there = (opened(photo_set(tmp_path / name, PETS)) for name in ("here", "there"))
    if other == "held out":
        names = frozenset(there.train.name(index) for index in (0, 1, 8, 9))
        there = opened(tmp_path / "there", before=Before(names))
    else:
        trained = tmp_path / "there" / there.train.name(0)
        trained.rename(trained.with_name("other.jpg"))
        there = opened(tmp_path / "there", before=Before(frozenset(here.val.name(n) for n in range(4))))
    assert re.search(r"rank 1 on .*rank 0 \(names of files", errors(here, there)[0])


def photos_of(root, counts):
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            coloured(root / name / f"{number}.png", (200 * (label % 2), 90, 60 + 90 * (label // 2)), (12, 12), number)
    return root


def half_done(root, output, mode=("mode=single",)):
    """A run of four epochs that ended after two."""
    words = [
        *mode,
        "data.name=imagefolder",
        f"data.root={root}",
        "batch_size=4",
        "epochs=4",
        f"output={output}",
        *QUIET,
    ]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:7"}).returncode
    assert (output / "checkpoints").is_dir()
    return [*words, "resume=auto"]


def test_renamed_classes_are_not_continued(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    (root / "ant").rename(root / "zebra")
    done = trainer(*again)
    assert done.returncode == 3 and "(bee was ant, zebra was bee)" in done.stderr
    (root / "zebra").rename(root / "ant")
    ok(*again)
    (root / "ant").rename(root / "zebra")
    for words in (["evaluate"], ["predict", "predict.split=val"]):
        done = trainer(*words, f"checkpoint={tmp_path / 'run'}")
        assert done.returncode == 4 and "2 classes (ant, bee)" in done.stderr
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert trainer("evaluate", f"checkpoint={newest}").returncode == 4


def told(again):
    """Of the images, by the run that goes on; the next one tells nothing."""
    first, second = ok(*again).stdout, ok(*again).stdout
    assert "the images changed since then" not in second
    return "".join(line for line in first.splitlines() if "the images changed since then" in line)


def swapped(folder, *names):
    """Each class folder gets the name of the one before."""
    for one, other in zip((names[0], *names[1:], "aside"), ("aside", *names), strict=True):
        (folder / one).rename(folder / other)


@pytest.mark.parametrize(
    ("split", "mode"), [(False, ("mode=single",)), pytest.param(True, ("mode=ddp", "nproc=2"), marks=pytest.mark.slow)]
)
def test_class_folders_that_changed_places_are_not_continued(tmp_path, split, mode):
    root = tmp_path / "photos"
    for part in ("train", "val") if split else ("",):
        photos_of(root / part, {"ant": 8, "bee": 8, "cow": 8})
    again = half_done(root, tmp_path / "run", mode=mode)
    swapped(root / ("train" if split else ""), "ant", "bee")
    done = trainer(*again)
    assert done.returncode == 3 and re.search(r"of ant, bee have other sizes.*output=", done.stderr)
    assert "Traceback" not in done.stderr
    anew = [word for word in again if not word.startswith(("output=", "resume="))]
    ok(*anew, f"output={tmp_path / 'other'}", f"model.init_from={tmp_path / 'run'}")
    swapped(root / ("train" if split else ""), "ant", "bee")
    assert not told(again)


@pytest.mark.parametrize("change", ["added", "one replaced", "another split"])
def test_changed_files_are_told_where_a_run_goes_on(tmp_path, change):
    root = photos_of(tmp_path / "photos", {"ant": 10, "bee": 10})
    again = half_done(root, tmp_path / "run")
    table = tmp_path / "run" / "split.csv"
    lines = table.read_text().splitlines()
    held, trained = ([line for line in lines if line.endswith(part)] for part in (",val", ",train"))
    name = trained[0].split(",")[0]
    if change == "added":
        for number in range(4):
            coloured(root / "bee" / f"new-{number}.png", (200, 90, 60), (12, 12), 99)
    elif change == "one replaced":
        photo(root / name, (12, 12))
    else:  # without its split.csv another seed's split is not that of the run
        swap = {held[0]: held[0][:-3] + "train", trained[0]: trained[0][:-5] + "val"}
        table.write_text("\n".join(swap.get(line, line) for line in lines) + "\n")
    said = told(again)
    wanted = {"added": "20 and there were 16", "one replaced": "training: 1 of 16 photos checked"}
    assert wanted.get(change, "training: as many, with other names") in said
    assert ("may have been trained on" in said) == (change != "one replaced")
    assert ("held out: as many" in said) == (change == "another split")

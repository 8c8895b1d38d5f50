"""Ranks with other images report them before the first step, and a resumed run keeps its first
classes.
"""

import os
import re
import shutil

import numpy as np
import pytest

from tests.command_line import QUIET, ok, trainer
from tests.data.photo_folders import coloured, opened, photo, photo_set
from tests.strategies import on_ranks
from trainer.data.folders.layout import Before
from trainer.errors import SetupError
from trainer.training.same_images import ROLES, _find_changed, check_same_images, hash_contents

PETS = {"cat": 10, "dog": 10}
# How the images of a role have changed, in the output of a resumed run.
REPORT = re.compile(rf": (?:{'|'.join(ROLES.values())}): ")


def errors(*data):
    """Return the error of each rank, which found its part of `data`."""

    def work(world):
        try:
            check_same_images(world, data[world.rank])
        except SetupError as error:
            return str(error)
        return None

    return on_ranks(len(data), work)


def test_other_images_are_reported_on_every_rank(tmp_path):
    here = opened(photo_set(tmp_path / "here", PETS))
    photo(photo_set(tmp_path / "there", PETS) / "cat" / "new.jpg")
    message = errors(here, here, opened(tmp_path / "there"))
    assert len(set(message)) == 1
    assert "rank 2 on " in message[0]
    assert "(training images: 17 there, 16 here)" in message[0]
    assert "split.csv" in message[0]
    (message, _) = errors(here, opened(tmp_path / "here", "data.image_size=32"))
    assert "(shape: 3 x 32 x 32 there, 3 x 224 x 224 here)" in message


@pytest.mark.parametrize("other", ["held out", "renamed"])
def test_the_same_number_of_other_images_is_reported(tmp_path, other):
    here, there = (opened(photo_set(tmp_path / name, PETS)) for name in ("here", "there"))
    if other == "held out":
        names = frozenset(there.train.name(index) for index in (0, 1, 8, 9))
        there = opened(tmp_path / "there", before=Before(names))
    else:
        trained = tmp_path / "there" / there.train.name(0)
        trained.rename(trained.with_name("other.jpg"))
        there = opened(
            tmp_path / "there", before=Before(frozenset(here.val.name(n) for n in range(4)))
        )
    assert re.search(r"rank 1 on .*rank 0 \(names\b", errors(here, there)[0])


def photos_of(root, counts):
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            coloured(
                root / name / f"{number}.png",
                (200 * (label % 2), 90, 60 + 90 * (label // 2)),
                (12, 12),
                number,
            )
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


@pytest.mark.slow
def test_renamed_classes_are_not_continued(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    (root / "ant").rename(root / "zebra")
    completed = trainer(*again)
    assert completed.returncode == 3
    assert re.search(r"\(bee .*\bant, zebra .*\bbee\)", completed.stderr)
    (root / "zebra").rename(root / "ant")
    ok(*again)
    (root / "ant").rename(root / "zebra")
    for words in (["evaluate"], ["predict", "predict.split=val"]):
        completed = trainer(*words, f"checkpoint={tmp_path / 'run'}")
        assert completed.returncode == 4 and "2 classes (ant, bee)" in completed.stderr
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert trainer("evaluate", f"checkpoint={newest}").returncode == 4


def told(again):
    """Return the message of a resumed run about its images; the next resume has none."""
    first = ok(*again).stdout
    second = ok(*again).stdout
    assert not REPORT.search(second)
    return "".join(line for line in first.splitlines() if REPORT.search(line))


def swapped(folder, *names):
    """Rename each class folder to the name of the previous one."""
    for one, other in zip((names[0], *names[1:], "aside"), ("aside", *names), strict=True):
        (folder / one).rename(folder / other)


@pytest.mark.slow(cases=["False-mode0"])
@pytest.mark.parametrize(
    ("split", "mode"),
    [
        (False, ("mode=single",)),
        pytest.param(True, ("mode=ddp", "nproc=2"), marks=pytest.mark.slow),
    ],
)
def test_class_folders_that_changed_places_are_not_continued(tmp_path, split, mode):
    root = tmp_path / "photos"
    for part in ("train", "val") if split else ("",):
        photos_of(root / part, {"ant": 8, "bee": 8, "cow": 8})
    again = half_done(root, tmp_path / "run", mode=mode)
    swapped(root / ("train" if split else ""), "ant", "bee")
    completed = trainer(*again)
    assert completed.returncode == 3
    assert re.search(r"\bant, bee .*\boutput=", completed.stderr)
    assert "Traceback" not in completed.stderr
    anew = [word for word in again if not word.startswith(("output=", "resume="))]
    ok(*anew, f"output={tmp_path / 'other'}", f"model.init_from={tmp_path / 'run'}")
    swapped(root / ("train" if split else ""), "ant", "bee")
    assert not told(again)


@pytest.mark.slow
def test_arrays_of_one_shape_that_changed_places_are_not_continued_and_copies_are(tmp_path):
    """Array sizes are equal.

    A copy of the data set, on another machine for example, has other times.
    """
    root = tmp_path / "arrays"
    for label, name in enumerate(("ant", "bee")):
        (root / name).mkdir(parents=True)
        for number in range(8):
            path = root / name / f"{number}.npy"
            np.save(
                path,
                np.full(
                    (80, 80, 3),
                    100 * label + number,
                    np.uint8,
                ),
            )
            os.utime(path, (1e9, 1e9))
    again = half_done(root, tmp_path / "run")
    swapped(root, "ant", "bee")
    completed = trainer(*again)
    assert (
        completed.returncode == 3
        and re.search(r"\bant, bee .*\boutput=", completed.stderr)
        and "Traceback" not in completed.stderr
    )
    swapped(root, "ant", "bee")
    shutil.copytree(root, tmp_path / "copy")
    moved = [word.replace(f"data.root={root}", f"data.root={tmp_path / 'copy'}") for word in again]
    assert not REPORT.search(ok(*moved).stdout)


def test_checkpoints_of_earlier_versions_tell_sizes_alone(tmp_path):
    data = opened(photo_set(tmp_path / "here", PETS))
    samples = hash_contents(data)
    older = {key: value for key, value in samples.items() if key.endswith("_images")}
    assert not _find_changed(samples, older, "train").any()
    assert not _find_changed(samples, samples, "val").any()
    changed = {**samples, "train_contents": samples["train_contents"] + 1}
    assert _find_changed(samples, changed, "train").all()


@pytest.mark.slow(cases=["one replaced", "added", "another split"])
@pytest.mark.parametrize("change", ["added", "one replaced", "another split"])
def test_changed_files_are_reported_when_a_run_resumes(tmp_path, change):
    root = photos_of(tmp_path / "photos", {"ant": 10, "bee": 10})
    again = half_done(root, tmp_path / "run")
    table = tmp_path / "run" / "split.csv"
    lines = table.read_text().splitlines()
    kept, trained = ([line for line in lines if line.endswith(part)] for part in (",val", ",train"))
    name = trained[0].split(",")[0]
    if change == "added":
        for number in range(4):
            coloured(root / "bee" / f"new-{number}.png", (200, 90, 60), (12, 12), 99)
    elif change == "one replaced":
        photo(root / name, (12, 12))
    else:  # The split of another seed is not that of the run if split.csv is missing.
        swap = {kept[0]: kept[0][:-3] + "train", trained[0]: trained[0][:-5] + "val"}
        table.write_text("\n".join(swap.get(line, line) for line in lines) + "\n")
    message = told(again)
    expected = {
        "added": r"training: 20 .*\b16\b",
        "one replaced": r"training: 1 of 16\b",
        "another split": r"training: .*\bnames\b.*held out: .*\bnames\b",
    }
    assert re.search(expected[change], message)
    # The best epoch so far was chosen by other images.
    assert ("best" in message) == (change != "one replaced")
    assert ("held out: " in message) == (change == "another split")

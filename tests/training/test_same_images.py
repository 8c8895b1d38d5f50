"""Ranks that found other images say so before the first step, and a run goes on with the classes that it began with."""

import re
import shutil

import pytest

from tests.command_line import QUIET, ok, trainer
from tests.data.photo_folders import coloured, opened, photo, photo_set
from tests.data.shards.making import jpeg, tarred, with_classes
from tests.worlds import on_ranks
from trainer.data.folders.layout import Before
from trainer.errors import SetupError
from trainer.saving.checkpoint import commit, load
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


def test_the_same_images_elsewhere_are_the_same(tmp_path):
    here, there = (opened(photo_set(tmp_path / name, PETS)) for name in ("here", "there"))
    assert errors(here, there, here) == [None] * 3


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
    assert re.search(r"rank 1 on .*other files .*rank 0", errors(here, there)[0])


def photos_of(root, counts):
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            coloured(root / name / f"{number}.png", (200 * (label % 2), 90, 60 + 90 * (label // 2)), (12, 12), number)
    return root


def half_done(root, output, *words, name="imagefolder", mode=("mode=single",), **env):
    """A run of four epochs that ended after two."""
    words = [*mode, f"data.name={name}", f"data.root={root}", "batch_size=4", "epochs=4", *words]
    words += [f"output={output}", *QUIET]
    assert trainer(*words, env={"TRAINER_FAULT": "kill@0:7", **env}).returncode
    assert (output / "checkpoints").is_dir()
    return [*words, "resume=auto"]


def test_renamed_classes_are_not_continued(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    (root / "ant").rename(root / "zebra")
    done = trainer(*again)
    assert done.returncode == 3 and "(gone: ant; new: zebra)" in done.stderr
    (root / "zebra").rename(root / "ant")
    ok(*again)
    (root / "ant").rename(root / "zebra")
    for words in (["evaluate", f"checkpoint={tmp_path / 'run'}"], ["predict", f"checkpoint={tmp_path / 'run'}"]):
        done = trainer(*words, *["predict.split=val"] * (words[0] == "predict"))
        assert done.returncode == 4 and "2 classes (ant, bee)" in done.stderr
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert trainer("evaluate", f"checkpoint={newest}").returncode == 4


def test_classes_in_another_order_are_not_continued(tmp_path):
    root, env = tmp_path / "shards", {"TRAINER_DATA": str(tmp_path / "kept")}
    tarred(root / "a-000.tar", with_classes([0, 1] * 10))
    (root / "classes.txt").write_text("ant\nbee\n")
    again = half_done(root, tmp_path / "run", "data.image_size=16", name="shards", **env)
    (root / "classes.txt").write_text("bee\nant\n")
    done = trainer(*again, env=env)
    assert done.returncode == 3 and re.search(r"order .*\(ant, bee ", done.stderr)
    (root / "classes.txt").write_text("ant\nbee\n")
    ok(*again, env=env)


def test_changed_files_are_told_where_a_run_goes_on(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    (root / "ant" / "1.png").unlink()
    for name in ("a", "b", "c", "d"):
        coloured(root / "bee" / f"{name}.png", (200, 90, 60), (12, 12), 99)
    said = ok(*again).stdout
    told = next(line for line in said.splitlines() if "the images changed since then" in line)
    assert "4 added" in told and "1 removed" in told and "an epoch is 3 steps" not in told
    assert "the images changed" not in ok(*again).stdout


def sizes_told(said):
    return [line for line in said.splitlines() if "the images changed since then" in line and "different size" in line]


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["one folder", "train and val"])
def test_swapped_class_folders_of_equal_names_are_not_continued(tmp_path, split):
    root, counts = tmp_path / "photos", {"ant": 8, "bee": 8, "cow": 8}
    for part in ("train", "val") if split else ("",):
        photos_of(root / part, counts)
    again = half_done(root, tmp_path / "run")
    folder = root / "train" if split else root

    def swap():
        (folder / "ant").rename(folder / "aside")
        (folder / "bee").rename(folder / "ant")
        (folder / "aside").rename(folder / "bee")

    swap()
    done = trainer(*again)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert re.search(r"\(ant .*\bbee, bee .*\bant\).*output=", done.stderr)
    anew = [word for word in again if not word.startswith(("output=", "resume="))]
    ok(*anew, f"output={tmp_path / 'other'}", f"model.init_from={tmp_path / 'run'}")
    swap()
    assert "the images changed" not in ok(*again).stdout


def test_class_folders_that_changed_places_in_a_ring_end_all_ranks(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8, "cow": 8})
    again = half_done(root, tmp_path / "run", mode=("mode=ddp", "devices=[cpu,cpu]"))
    for one, other in (("ant", "aside"), ("bee", "ant"), ("cow", "bee"), ("aside", "cow")):
        (root / one).rename(root / other)
    done = trainer(*again)
    assert done.returncode == 3 and re.search(r"\(ant .*\bcow, bee .*\bant, cow .*\bbee\)", done.stderr)


def test_a_photo_replaced_under_its_name_is_told_once(tmp_path):
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    trained = (tmp_path / "run" / "split.csv").read_text().splitlines()
    name = next(line for line in trained if line.endswith(",train")).split(",")[0]
    photo(root / name, (12, 12))
    (root / "bee" / "new.png").write_bytes((root / "bee" / "1.png").read_bytes())
    (line,) = sizes_told(ok(*again).stdout)
    assert "size" in line and f"({name})" in line
    assert "1 added, 0 removed" in line and "; 1 of " in line
    assert "the images changed" not in ok(*again).stdout


def test_photos_that_were_all_written_anew_are_told_and_go_on(tmp_path):
    """Their sizes are no other class's."""
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run", "data.val_fraction=0.5")
    for path in root.glob("*/*.png"):
        photo(path, (24, 24), seed=int(path.stem))
    (line,) = sizes_told(ok(*again).stdout)
    assert "8 of 8 training photos" in line and "8 of 8 held out photos" in line


def test_an_image_replaced_in_a_shard_is_told(tmp_path):
    root, env = tmp_path / "shards", {"TRAINER_DATA": str(tmp_path / "kept")}
    members = with_classes([0, 1] * 10)
    tarred(root / "a-000.tar", members)
    again = half_done(root, tmp_path / "run", "data.image_size=16", name="shards", **env)
    at, (name, _) = next((at, one) for at, one in enumerate(members) if one[0].endswith(".jpg"))
    members[at] = (name, jpeg(99, (50, 50)))
    tarred(root / "a-000.tar", members)
    (line,) = sizes_told(ok(*again, env=env).stdout)
    assert " 1 of " in line and name in line and "added" not in line


def test_a_lost_split_is_told(tmp_path):
    """Without its split.csv another seed's split is not that of the run."""
    root = photos_of(tmp_path / "photos", {"ant": 10, "bee": 10})
    again = half_done(root, tmp_path / "run")
    lines = (tmp_path / "run" / "split.csv").read_text().splitlines()
    held = [line for line in lines if line.endswith(",val")]
    swapped = [line for line in lines if line.endswith(",train")][: len(held)]
    turned = {**{line: line[:-3] + "train" for line in held}, **{line: line[:-5] + "val" for line in swapped}}
    (tmp_path / "run" / "split.csv").write_text("\n".join(turned.get(line, line) for line in lines) + "\n")
    said = ok(*again).stdout
    assert "training 4 added, 4 removed; held out 4 added, 4 removed; 4 that " in said


@pytest.mark.parametrize("lacks", ["classes and samples", "sizes"])
def test_a_checkpoint_that_tells_less_is_continued(tmp_path, lacks):
    """As versions before had it."""
    root = photos_of(tmp_path / "photos", {"ant": 8, "bee": 8})
    again = half_done(root, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        state = load(folder)
        samples = state.tensors.pop("samples")
        if lacks == "sizes":
            state.tensors["samples"] = {role: samples[role] for role in ("train", "val")}
        else:
            state.facts.pop("classes")
        shutil.rmtree(folder)
        commit(tmp_path / "run", state, keep=5)
    photo(root / "ant" / "1.png", (24, 24))
    if lacks != "sizes":
        (root / "ant" / "2.png").unlink()
    said = ok(*again).stdout
    assert "resuming at step" in said and "changed since then" not in said

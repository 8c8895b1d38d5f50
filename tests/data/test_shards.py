"""Runs on archives through the real command line: training, evaluation and prediction equal those
on folders.
"""

import csv
import shutil

import pytest
import torch

from tests.command_line import QUIET, losses, ok, result
from tests.data.archives.making import parquet, tarred, with_classes
from tests.data.photo_folders import coloured
from trainer.saving.weights import read_weights

COLOURS = {
    "blue": (30, 30, 200),
    "green": (30, 200, 30),
    "red": (200, 30, 30),
}
WORDS = [
    *(
        "model.name=cnn",
        "batch_size=8",
        "augment.crop=resized",
        "data.image_size=32",
        "data.workers=2",
    ),
    *("seed=3", "augment.hflip=0.5", *QUIET),
]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The same photos in folders, in tars with folders, in a WebDataset and in Parquet; in one
    order.
    """
    root = tmp_path_factory.mktemp("sets")
    photos = root / "folders"
    for part, count in (("train", 12), ("val", 5)):
        for name, colour in COLOURS.items():
            for n in range(count):
                coloured(photos / part / name / f"{n:02}.jpg", colour, (56, 48), seed=n)
        paths = sorted((photos / part).rglob("*.jpg"))
        half = len(paths) // 2
        for number, some in enumerate((paths[:half], paths[half:])):
            members = [(str(path.relative_to(photos / part)), path.read_bytes()) for path in some]
            tarred(root / "tar" / f"{part}-{number:03}.tar", members)
            labels = [sorted(COLOURS).index(path.parent.name) for path in some]
            pairs = with_classes(labels, images=[data for _, data in members])
            tarred(root / "wds" / f"x-{part}-{number:03}.tar", pairs)
            (root / "wds" / "classes.txt").write_text("\n".join(sorted(COLOURS)))
    return root


def trained(sets, kind, output, *words):
    source = [
        f"data.name={'imagefolder' if kind == 'folders' else 'shards'}",
        f"data.root={sets / kind}",
    ]
    return ok(*source, *WORDS, "mode=single", "epochs=2", f"output={output}", *words)


@pytest.fixture(scope="module")
def folders(sets):
    output = sets / "runs" / "folders"
    trained(sets, "folders", output)
    return output


def same(run, other):
    assert losses(run) == losses(other)
    weights, others = (read_weights(each / "last.safetensors")[0] for each in (run, other))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    for key in ("val_loss", "val_top1"):
        assert result(run)[key] == result(other)[key]


@pytest.mark.slow(cases=["tar"])
@pytest.mark.parametrize("kind", ["tar", "wds"])
def test_losses_are_those_of_folders(sets, folders, kind, tmp_path):
    finished = trained(sets, kind, tmp_path / "run")
    same(tmp_path / "run", folders)
    assert "blue 12 + 5, green 12 + 5, red 12 + 5 " in finished.stdout


def test_losses_of_parquet_are_those_of_folders(sets, folders, tmp_path):
    for part in ("train", "val"):
        paths = sorted((sets / "folders" / part).rglob("*.jpg"))
        labels = [sorted(COLOURS).index(path.parent.name) for path in paths]
        images = [path.read_bytes() for path in paths]
        parquet(
            sets / "parquet" / f"{part}-00000-of-00001.parquet",
            images,
            labels,
            sorted(COLOURS),
            group=10,
        )
    trained(sets, "parquet", tmp_path / "run")
    same(tmp_path / "run", folders)
    for kind in ("folders", "parquet"):
        trained(
            sets, kind, tmp_path / kind, "data.cache=disk", f"data.cache_dir={tmp_path / 'cache'}"
        )
    same(tmp_path / "parquet", tmp_path / "folders")


@pytest.mark.slow
def test_a_split_of_its_own_is_remembered_evaluated_and_predicted(sets, tmp_path):
    members = [
        (f"{path.parent.name}/{path.name}", path.read_bytes())
        for path in sorted((sets / "folders" / "train").rglob("*.jpg"))
    ]
    path = tarred(tmp_path / "photos.tar", members)
    run = tmp_path / "run"
    ok("data.name=shards", f"data.root={path}", *WORDS, "mode=single", "epochs=4", f"output={run}")
    split = list(csv.DictReader((run / "split.csv").open()))
    kept = {row["file"] for row in split if row["split"] == "val"}
    assert len(split) == 36
    assert len(kept) == 6
    assert all(name.startswith("photos.tar/") for name in kept)
    output = ok("evaluate", f"checkpoint={run}").stdout
    assert "6 held-out images" in output and f"{100 * result(run)['val_top1']:.2f}" in output
    ok("predict", f"checkpoint={run}", "predict.split=val", f"output={tmp_path / 'out'}")
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert {row["path"] for row in rows} == {f"{tmp_path}/{name}" for name in kept}
    assert {row["label"] for row in rows} <= {*COLOURS}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in (sets / "tar").glob("val-*.tar"):
        shutil.copy(path, moved / path.name)
    other = ok("evaluate", f"checkpoint={run}", f"data.root={moved}").stdout
    assert "15 held-out images" in other

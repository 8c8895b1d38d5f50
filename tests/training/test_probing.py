"""Runs that train the last layer on features: against runs with frozen layers and scikit-learn."""

import errno
import os
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier

import trainer as api
from tests.checks import refusal
from tests.command_line import QUIET, latest, losses, ok, result, rows, trainer
from tests.data.photo_folders import coloured
from tests.modes.ways import WORKERS
from trainer.data.cache import homes
from trainer.recipe import load
from trainer.recipe.checks import check_options
from trainer.telemetry.events import read_curves
from trainer.training import probing

WORDS = [
    "recipe=digits",
    "model.name=resnet8",
    "augment.crop=none",
    "seed=3",
    "epochs=3",
    "batch_size=64",
    "save.every_epochs=1",
    "threads=1",
    *QUIET,
]
# Photos of this size are not kept in memory.
SIZE = (100, 80)
FROZEN = "model.freeze=-1"
PROBE = "model.probe=true"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A network with BatchNorm, whose statistics differ from those of a batch."""
    folder = tmp_path_factory.mktemp("backbone") / "run"
    ok(*latest(*WORDS, "mode=single", "epochs=1"), f"output={folder}")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of caches of this test's runs."""
    monkeypatch.setenv("TRAINER_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "cache"


def source_of(folder):
    """Return whether a run computed its features or read them."""
    return result(folder)["facts"]["features"].split()[4].strip(",;")


def assert_same_head(folder, frozen, backbone, layer):
    """A probe equals a run with frozen layers, and both have the layers that they started from."""
    ours = load_file(folder / "last.safetensors")
    expected = load_file(frozen / "last.safetensors")
    initial = load_file(backbone / "last.safetensors")
    assert [*ours] == [*expected]
    for name, tensor in ours.items():
        if name.startswith(layer):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
            assert tensor.shape != initial[name].shape or not torch.equal(tensor, initial[name])
        else:
            assert torch.equal(tensor, initial[name]), name
    assert losses(folder) == pytest.approx(losses(frozen), rel=1e-4)
    for key in ("val_loss", "val_top1", "best_epoch", "steps"):
        assert result(folder)[key] == pytest.approx(result(frozen)[key], rel=1e-4)


WAYS = {
    "single": ["mode=single"],
    "ddp": ["mode=ddp", "nproc=2"],
    "dp": ["mode=dp", "devices=[cpu,cpu]"],
    "local_sgd": WORKERS["local_sgd"],
    "balanced": ["mode=single", "data.balance=true"],
    "multilabel": ["mode=single", "loss.label_smoothing=0.1", "ema=0.9", "accumulate=2"],
}
SLOW = [pytest.mark.slow]


@pytest.mark.full(but=["single", "ddp", "dp"])
@pytest.mark.parametrize(
    "way", ["single", *(pytest.param(name, marks=SLOW) for name in [*WAYS][1:])]
)
def test_a_probe_equals_a_run_with_frozen_layers(way, backbone, cache, tmp_path):
    # The last layer is new, since the other run has another number of outputs.
    words = [*WORDS, *WAYS[way], f"model.init_from={backbone}", "model.num_classes=11"]
    ok(*words, FROZEN, f"output={tmp_path / 'frozen'}")
    ok(*words, PROBE, f"output={tmp_path / 'probe'}")
    assert_same_head(tmp_path / "probe", tmp_path / "frozen", backbone, "head.")


@pytest.mark.slow
def test_neighbors_are_those_of_scikit_learn(backbone, cache, tmp_path):
    run = tmp_path / "run"
    words = [*WORDS, "mode=single", f"model.init_from={backbone}", PROBE]
    words.remove("logging.tensorboard=false")
    completed = ok(*words, f"output={run}")
    features = {}
    labels = {}
    for split in ("train", "val"):
        out = tmp_path / split
        ok("predict", run, "predict.features=true", f"predict.split={split}", f"output={out}")
        features[split] = np.load(out / "features.npy")
        labels[split] = [row["label"] for row in rows(out / "predictions.csv")]
    classifier = KNeighborsClassifier(
        20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07)
    )
    classifier.fit(features["train"], labels["train"])
    expected = classifier.score(features["val"], labels["val"])
    assert 0.5 < expected < 1
    assert result(run)["knn_top1"] == pytest.approx(expected, abs=1e-9)
    curve = read_curves(run)["val/knn_top1"][2]
    assert curve == pytest.approx([expected] * 3, abs=1e-6)
    (done,) = re.findall(r"^  done .*", completed.stdout, re.MULTILINE)
    assert f"{expected:.2%}" in done and f"{result(run)['val_top1']:.2%}" in done


@pytest.mark.slow
def test_a_probe_is_an_ordinary_run(backbone, cache, tmp_path):
    run = tmp_path / "run"
    ok(*WORDS, "mode=single", f"model.init_from={backbone}", PROBE, f"output={run}")
    evaluated = api.evaluate(run, "checkpoint=last", "mode=split", "devices=[cpu,cpu]")
    assert evaluated["val_top1"] == result(run)["val_top1"]
    assert evaluated["val_loss"] == pytest.approx(result(run)["val_loss"], rel=1e-5)
    ok("export", run, "format=exported_program", f"output={tmp_path / 'model.pt2'}")
    assert api.load(run).classes == tuple("0123456789")
    ok(*WORDS, "mode=single", f"model.init_from={run}", "max_steps=1", f"output={tmp_path / 'on'}")


@pytest.mark.slow
def test_a_resumed_probe_has_the_weights_of_one_that_was_not_killed(backbone, cache, tmp_path):
    words = [*WORDS, "mode=single", f"model.init_from={backbone}", PROBE]
    ok(*words, f"output={tmp_path / 'whole'}")
    killed = trainer(*words, f"output={tmp_path / 'run'}", env={"TRAINER_FAULT": "kill@0:30"})
    assert killed.returncode
    shutil.rmtree(cache)
    ok(*words, f"output={tmp_path / 'run'}", "resume=auto")
    for name in ("last.safetensors", "best.safetensors"):
        expected = load_file(tmp_path / "whole" / name)
        ours = load_file(tmp_path / "run" / name)
        assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())
    assert result(tmp_path / "run")["knn_top1"] == result(tmp_path / "whole")["knn_top1"]


@pytest.mark.slow
def test_features_are_read_again_unless_what_they_depend_on_has_changed(backbone, cache, tmp_path):
    for number, colour in enumerate([(200, 90, 60), (60, 90, 200), (60, 200, 90)]):
        for index in range(12):
            path = tmp_path / "photos" / f"class{number}" / f"{index}.png"
            coloured(path, colour, SIZE, index)
    words = [
        *("recipe=probe", "mode=single", f"data.root={tmp_path / 'photos'}", "batch_size=8"),
        *("model.name=resnet8", "model.weights=null", "data.image_size=72", "epochs=2"),
        *("data.check=off", "data.workers=1", *QUIET),
    ]

    def train(name, *others):
        ok(*latest(*words, *others), f"output={tmp_path / name}")
        return source_of(tmp_path / name)

    assert train("first") == "computed"
    assert train("second", "epochs=3", "optimizer.lr=0.02") == "read"
    ok(*words, "model.probe=false", FROZEN, f"output={tmp_path / 'frozen'}")
    ours = load_file(tmp_path / "first" / "last.safetensors")
    expected = load_file(tmp_path / "frozen" / "last.safetensors")
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    for changes in (["data.mean=[0.4,0.5,0.5]"], ["seed=1"], ["data.resize=76"]):
        assert train("-".join(changes).replace(".", "-"), *changes) == "computed", changes
    assert len([*cache.iterdir()]) == 4
    photo = tmp_path / "photos" / "class0" / "0.png"
    status = photo.stat()
    coloured(photo, (10, 10, 10), SIZE, 99)
    os.utime(photo, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert train("changed") == "computed"
    for file in cache.glob("*/features.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert train("damaged") == "computed" and train("again") == "read"
    listed = ok("cache", "list").stdout
    assert "5 caches" in listed and "features 64" in listed and " 36 " in listed
    home = next(cache.iterdir()).name
    ok("cache", "delete", home, "yes=true")
    assert not (cache / home).exists()


def test_features_that_do_not_fit_on_the_disk_leave_no_file(monkeypatch, tmp_path):
    def fail(path, parts, place):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(probing, "write_synced", fail)
    features = {"train": torch.ones(3, 2), "val": torch.ones(1, 2)}
    phrase = probing.keep_features(tmp_path / "home", features, None)
    assert "not kept" in phrase and "data.cache_dir=" in phrase
    assert [file.name for file in (tmp_path / "home").iterdir()] == [homes.USED]


def test_an_unreadable_photo_is_an_error(tmp_path, cache):
    for number, colour in enumerate([(200, 90, 60), (60, 90, 200)]):
        for index in range(10):
            coloured(tmp_path / "photos" / str(number) / f"{index}.png", colour, SIZE, index)
    (tmp_path / "photos" / "0" / "3.png").write_bytes(b"no image")
    completed = trainer(
        *("recipe=probe", "mode=single", f"data.root={tmp_path / 'photos'}", "batch_size=8"),
        *("model.name=resnet8", "model.weights=null", "data.image_size=72", "data.check=off"),
        *("data.on_error=skip", *QUIET),
        cwd=tmp_path,
    )
    assert completed.returncode == 2
    assert re.search(r"model\.probe=true .*\b1 of the (train|val) split", completed.stderr)


MODELS = """
import torch
from torch import nn
from trainer import register_model

@register_model("scaled")
class Scaled(nn.Sequential):
    def __init__(self, num_classes, channels, image_size):
        super().__init__(nn.Flatten(), nn.Linear(channels * image_size**2, 8), nn.ReLU(),
                         nn.Linear(8, num_classes))

    def forward(self, images):
        return 2 * super().forward(images)

@register_model("reversed")
class Reversed(nn.Module):
    def __init__(self, num_classes, channels, image_size):
        super().__init__()
        self.last = nn.Linear(8, num_classes)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(channels * image_size**2, 8)

    def forward(self, images):
        return self.last(self.drop(self.norm(self.first(images.flatten(1)))))
"""


@pytest.mark.slow
def test_the_last_layer_of_a_plugin_is_found_or_its_lack_is_an_error(cache, tmp_path):
    (tmp_path / "mine_to_probe.py").write_text(MODELS)
    words = [*WORDS, "plugin=mine_to_probe", "mode=single", PROBE]
    completed = trainer(*latest(*words, "model.name=scaled"), cwd=tmp_path)
    assert completed.returncode == 2
    assert re.search(r"model\.name=scaled .*type (model\.\S+ model\.\S+),", completed.stderr)
    remedy = ["model.name=scaled", "model.probe=false", FROZEN, "max_steps=1"]
    ok(*latest(*words, *remedy), cwd=tmp_path)
    ok(*latest(*words, "model.name=reversed"), f"output={tmp_path / 'run'}", cwd=tmp_path)
    weights = load_file(tmp_path / "run" / "last.safetensors")
    assert weights["norm.num_batches_tracked"] == 0
    assert result(tmp_path / "run")["val_top1"] > 0.5


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["augment.hflip=0.5", "augment.mixup=0.2"], "augment.hflip=0.0 augment.mixup=0.0"),
        (["data.train_size=16"], "data.train_size=null"),
        (["model.freeze=1"], "model.freeze=null"),
        (["distill.teacher=resnet18"], "distill.teacher=null"),
        (["recompute=true", "sync_bn=true"], "recompute=false sync_bn=false"),
    ],
)
def test_keys_that_a_probe_would_ignore_are_refused(words, remedy):
    words = ["augment.crop=none", PROBE, *words]
    message = refusal(check_options, load("digits", *words))
    assert f"type {remedy}, or model.probe=false" in message
    check_options(load("digits", *latest(*words, *remedy.split())))
    check_options(load("digits", *latest(*words, "model.probe=false")))

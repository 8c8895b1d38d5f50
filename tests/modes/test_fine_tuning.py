"""Freezing, shares of the learning rate, Muon: in every mode through the real command line, as in `single`."""

import re
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import BARE, losses, ok, result, steps, trainer
from tests.modes.ways import EXACT, WORKERS
from tests.training.test_training import SAME
from trainer.models.zoo import build
from trainer.optim.trainable import normalises_batches
from trainer.recipe import load

SHORT = [word for word in SAME if not word.startswith(("max_steps", "optimizer.lr"))]
SHORT += ["max_steps=8", "schedule.warmup_epochs=0", *BARE]
SGD = ["optimizer.lr=0.01", "optimizer.momentum=0.9"]
OPTIONS = {
    # The first of two stages is frozen as a whole.
    "frozen": ["model.name=cnn_gn", *SGD, "model.freeze=2", "clip_grad_norm=1", "ema=0.9"],
    "frozen in between": ["model.name=cnn_gn", *SGD, "model.freeze=['4','8.weight','9']"],
    "layer_decay": ["model.name=cnn_gn", "optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.layer_decay=0.5"],
    "muon": ["model.name=vit_tiny", "optimizer.name=muon", "optimizer.lr=0.001", "optimizer.nesterov=true"],
    "muon's convolutions": ["model.name=cnn_gn", "optimizer.name=muon", "optimizer.lr=0.001"],
    "lr_per": ["model.name=cnn_gn", "optimizer.lr=0.02", "optimizer.lr_per=128"],
}
CUT = {"cnn_gn": "7", "vit_tiny": "encoder.layers.encoder_layer_1"}
WAYS = {
    "dp": EXACT["dp"],
    "ddp": EXACT["ddp"],
    "split": ["mode=split", "devices=[cpu,cpu]", "pipeline.cuts=[{cut}]"],
    "streams": ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.microbatches=4", "pipeline.cuts=[{cut}]"],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.microbatches=4", "pipeline.cuts=[{cut}]"],
    "recomputed": ["mode=pipeline", "nproc=2", "pipeline.microbatches=4", "recompute=true"],
    "zbv": EXACT["zbv"],
    "zerobubble": EXACT["interleavedzerobubble"],
    "2x2": ["mode=pipeline", "nproc=4", "pipeline.stages=2", "pipeline.microbatches=4", "pipeline.cuts=[{cut}]"],
    "one": ["mode=local_sgd", "nproc=1"],  # a worker alone is `single`, where batches divide the set
}
DIVIDED = ["data.name=synthetic", "data.samples=256", "data.val_samples=64", "data.image_size=8"]
FAST = {
    ("streams", "frozen"),
    ("zbv", "frozen"),
    ("ddp", "frozen in between"),
    ("split", "layer_decay"),
    ("1f1b", "layer_decay"),
    ("ddp", "muon's convolutions"),
    ("1f1b", "muon's convolutions"),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """mode=single's folder for an option, trained when it is first asked for."""
    root = tmp_path_factory.mktemp("single")

    @cache
    def folder(option, *more):
        path = root / f"{option.replace(' ', '-')}{len(more)}"
        ok(*SHORT, *OPTIONS[option], *more, "mode=single", f"output={path}")
        return path

    return folder


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_every_mode_has_the_losses_of_single(way, option, single, tmp_path, full):
    if (way, option) not in FAST and not full:
        pytest.skip("the whole table takes long: --all")
    cut = CUT[OPTIONS[option][0].partition("=")[2]]
    more = DIVIDED if way == "one" else []
    ok(*SHORT, *OPTIONS[option], *more, *(word.format(cut=cut) for word in WAYS[way]), f"output={tmp_path / 'run'}")
    wanted = single(option, *more)
    assert losses(tmp_path / "run") == pytest.approx(losses(wanted), rel=1e-4)
    ours, theirs = (load_file(path / "last.safetensors") for path in (tmp_path / "run", wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 if option.startswith("muon") else 1e-4)
    if option.startswith("frozen"):
        for name in ("4.weight", "5.weight"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def test_the_rate_is_for_the_whole_batch(tmp_path):
    """However many ranks and pieces compute it."""
    words, plain = [*SHORT, "model.name=cnn_gn"], ["mode=single", "optimizer.lr=0.01"]
    ok(*words, *plain, f"output={tmp_path / 'plain'}")
    scaled = ["mode=ddp", "nproc=2", "accumulate=2", "optimizer.lr=0.04", "optimizer.lr_per=256"]
    said = ok(*words, *scaled, f"output={tmp_path / 'scaled'}").stdout
    assert re.search(r"\b0\.01: 0\.04 .*\b256\b.*batch_size=64", said)
    assert losses(tmp_path / "scaled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert [row["lr"] for row in steps(tmp_path / "scaled")] == [row["lr"] for row in steps(tmp_path / "plain")]


NORMS = {
    **{way: WAYS[way] for way in ("dp", "ddp", "split", "streams", "1f1b", "zbv", "recomputed")},
    "single": ["mode=single"],
    "sync_bn": ["mode=ddp", "nproc=2", "sync_bn=true"],
    "local_sgd": ["mode=local_sgd", "nproc=2", "local_sgd.every=2"],
    "hogwild": WORKERS["hogwild"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights to fine-tune, with statistics of their own."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ok(*SHORT, "model.name=cnn", *SGD, "mode=single", f"output={folder}")
    return folder / "last.safetensors"


@pytest.mark.parametrize("way", NORMS)
def test_what_is_frozen_stays_to_the_last_bit(way, trained, tmp_path, full):
    """BatchNorm's statistics too, in the moving average as well; the file has that."""
    if way not in ("ddp", "streams", "sync_bn") and not full:
        pytest.skip("--all")
    words = [word.format(cut="8") for word in NORMS[way]]
    words += [f"model.init_from={trained}", "model.freeze=1", "ema=0.9"]
    ok(*SHORT, "model.name=cnn", *SGD, *words, f"output={tmp_path / 'run'}")
    frozen = result(tmp_path / "run")["facts"]["frozen"]
    assert frozen.startswith("0, 1: 352 of 94,186 parameters; statistics of 1 normalisation layer")
    before = load_file(trained)
    for name in ("last", "best"):
        after = load_file(tmp_path / "run" / f"{name}.safetensors")
        assert after.keys() == before.keys() and before["1.num_batches_tracked"] == 8
        same = {key for key in after if torch.equal(after[key], before[key])}
        assert same == {key for key in after if key.startswith(("0.", "1."))}, "all of it, and nothing else"


@pytest.mark.parametrize(("wanted", "looks"), [("null", True), ("1", True), ("-1", False)])
def test_frozen_batch_norm_does_not_mind_small_batches(wanted, looks):
    """So that fine-tuning the last layer is not warned of a small batch."""
    recipe = load(None, "model.name=cnn", f"model.freeze={wanted}")
    assert normalises_batches(build(recipe.model, 10, 1, 8)) is looks


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model.freeze=conv1 mode=ddp nproc=2", "nothing in cnn that trains is called 'conv1'"),
        ("optimizer.name=muon model.freeze=-1 mode=pipeline devices=[cpu,cpu]", "cnn has none that train"),
    ],
)
def test_what_is_refused(words, says):
    done = trainer("recipe=digits", *words.split())
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr

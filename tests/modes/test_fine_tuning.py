"""Freezing, shares of the learning rate, Muon: in every mode through the real command line, as in
`single`.
"""

import re
from copy import deepcopy
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import BARE, QUIET, latest, losses, ok, result, steps, trainer
from tests.modes.ways import EXACT, WORKERS
from tests.training.whole_runs import SAME, assert_same_run, kill
from trainer import train
from trainer.models.norms import list_training_norms
from trainer.models.zoo import build
from trainer.recipe import load

SHORT = [word for word in SAME if not word.startswith(("max_steps", "optimizer.lr"))]
SHORT += ["max_steps=8", "schedule.warmup_epochs=0", *BARE]
SGD = ["optimizer.lr=0.01", "optimizer.momentum=0.9"]
OPTIONS = {
    # The first of two stages is frozen as a whole.
    "frozen": ["model.name=cnn_gn", *SGD, "model.freeze=2", "clip_grad_norm=1", "ema=0.9"],
    "frozen in between": ["model.name=cnn_gn", *SGD, "model.freeze=['4','8.weight','9']"],
    "layer_decay": [
        "model.name=cnn_gn",
        "optimizer.name=adamw",
        "optimizer.lr=0.01",
        "optimizer.layer_decay=0.5",
    ],
    "muon": [
        "model.name=vit_tiny",
        "optimizer.name=muon",
        "optimizer.lr=0.001",
        "optimizer.nesterov=true",
    ],
    "muon's convolutions": ["model.name=cnn_gn", "optimizer.name=muon", "optimizer.lr=0.001"],
    "lr_per": ["model.name=cnn_gn", "optimizer.lr=0.02", "optimizer.lr_per=128"],
}
CUT = {"cnn_gn": "7", "vit_tiny": "encoder.layers.encoder_layer_1"}
WAYS = {
    "dp": EXACT["dp"],
    "ddp": EXACT["ddp"],
    "split": ["mode=split", "devices=[cpu,cpu]", "pipeline.cuts=[{cut}]"],
    "streams": [
        "mode=pipeline",
        "devices=[cpu,cpu]",
        "pipeline.microbatches=4",
        "pipeline.cuts=[{cut}]",
    ],
    "1f1b": ["mode=pipeline", "nproc=2", "pipeline.microbatches=4", "pipeline.cuts=[{cut}]"],
    "recomputed": ["mode=pipeline", "nproc=2", "pipeline.microbatches=4", "recompute=true"],
    "zbv": EXACT["zbv"],
    "zerobubble": EXACT["interleavedzerobubble"],
    "2x2": [
        "mode=pipeline",
        "nproc=4",
        "pipeline.stages=2",
        "pipeline.microbatches=4",
        "pipeline.cuts=[{cut}]",
    ],
    "one": [
        "mode=local_sgd",
        "nproc=1",
    ],  # a worker alone is `single`, where batches divide the set
}
DIVIDED = ["data.name=synthetic", "data.samples=256", "data.val_samples=64", "data.image_size=8"]
FAST = {
    ("zbv", "frozen"),
    ("ddp", "frozen in between"),
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


@pytest.mark.slow(cases=["1f1b-muon's convolutions", "zbv-frozen"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_every_mode_has_the_losses_of_single(way, option, single, tmp_path, full):
    if (way, option) not in FAST and not full:
        pytest.skip("the whole table takes long: --all")
    cut = CUT[OPTIONS[option][0].partition("=")[2]]
    more = DIVIDED if way == "one" else []
    ok(
        *SHORT,
        *OPTIONS[option],
        *more,
        *(word.format(cut=cut) for word in WAYS[way]),
        f"output={tmp_path / 'run'}",
    )
    expected = single(option, *more)
    assert losses(tmp_path / "run") == pytest.approx(losses(expected), rel=1e-4)
    ours, reference = (
        load_file(path / "last.safetensors") for path in (tmp_path / "run", expected)
    )
    torch.testing.assert_close(
        ours, reference, rtol=1e-2, atol=1e-3 if option.startswith("muon") else 1e-4
    )
    if option.startswith("frozen"):
        for name in ("4.weight", "5.weight"):
            torch.testing.assert_close(ours[name], reference[name], rtol=0, atol=0)


@pytest.mark.slow
def test_the_rate_is_for_the_whole_batch(tmp_path):
    """The number of ranks and micro-batches does not change it."""
    words = [*SHORT, "model.name=cnn_gn"]
    plain = ["mode=single", "optimizer.lr=0.01"]
    ok(*words, *plain, f"output={tmp_path / 'plain'}")
    scaled = ["mode=ddp", "nproc=2", "accumulate=2", "optimizer.lr=0.04", "optimizer.lr_per=256"]
    output = ok(*words, *scaled, f"output={tmp_path / 'scaled'}").stdout
    assert re.search(r"\b0\.01: 0\.04 .*\b256\b.*batch_size=64", output)
    assert losses(tmp_path / "scaled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert [row["lr"] for row in steps(tmp_path / "scaled")] == [
        row["lr"] for row in steps(tmp_path / "plain")
    ]


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


@pytest.mark.slow(cases=["sync_bn", "ddp"])
@pytest.mark.parametrize("way", NORMS)
def test_frozen_weights_stay_to_the_last_bit(way, trained, tmp_path, full):
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
        assert same == {key for key in after if key.startswith(("0.", "1."))}, (
            "all of it, and nothing else"
        )


@pytest.mark.parametrize(("wanted", "looks"), [("null", True), ("1", True), ("-1", False)])
def test_frozen_batch_norm_does_not_mind_small_batches(wanted, looks):
    """Fine-tuning the last layer causes no warning about a small batch."""
    recipe = load(None, "model.name=cnn", f"model.freeze={wanted}")
    assert bool(list_training_norms(build(recipe.model, 10, 1, 8))) is looks


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model.freeze=conv1 mode=ddp nproc=2", r"model\.freeze: .*\bcnn\b.*'conv1'"),
        (
            "optimizer.name=muon model.freeze=-1 mode=pipeline devices=[cpu,cpu]",
            r"optimizer\.name=muon .*\bcnn\b.*optimizer\.name=sgd\b",
        ),
    ],
)
def test_invalid_fine_tuning_is_refused(words, says):
    completed = trainer("recipe=digits", *words.split())
    assert completed.returncode == 2
    assert re.search(says, completed.stderr), completed.stderr
    assert "Traceback" not in completed.stderr


# A layer that trains from its second epoch on, and one that trains until then: they count passes,
# and a checkpoint has the count.
UNFREEZING = """
import torch
from torch import nn
from trainer import register_model

class Unfreezing(nn.Module):
    def __init__(self, late=False):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.register_buffer("passes", torch.zeros(()))
        self.b.requires_grad_(False)
        self.late = late

    def train(self, mode=True):
        super().train(mode)
        if mode and not self.late:
            self.a.requires_grad_(bool(self.passes < 4))
            self.b.requires_grad_(bool(self.passes >= 4))
        return self

    def forward(self, x):
        if self.training:
            self.passes += 1
            if self.late and self.passes > 4:
                self.b.requires_grad_(True)
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))

register_model("unfreezing")(lambda num_classes, channels, image_size: Unfreezing())
register_model("late")(lambda num_classes, channels, image_size: Unfreezing(late=True))
"""
TURNS = [
    "recipe=digits",
    *DIVIDED,
    "data.channels=1",
    "augment.crop=none",
    "batch_size=64",
    "epochs=3",
    "plugin=unfreezing",
    "model.name=unfreezing",
    "schedule.warmup_epochs=0",
    "threads=1",
    "timeout=60",
    *QUIET,
]
TURNS += ["optimizer.weight_decay=0.1", "clip_grad_norm=0.5", "ema=0.9"]
ADAMW = ["optimizer.name=adamw", "optimizer.lr=0.01"]


@pytest.fixture
def unfreezing(tmp_path):
    (tmp_path / "unfreezing.py").write_text(UNFREEZING)
    return tmp_path


@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_model_whose_train_freezes_and_unfreezes_trains_as_in_torch(name, tmp_path):
    """Batches are complete, so their order makes no difference: the result equals torch's own
    optimizer with all parameters.
    """
    names = {"__name__": "unfreezing"}
    exec(UNFREEZING.partition("\nregister_model")[0], names)
    torch.manual_seed(0)
    model = names["Unfreezing"]()
    inputs = torch.rand(40, 64)
    targets = torch.arange(40) % 10
    ours = deepcopy(model)
    reference = deepcopy(model)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    more = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = kind(reference.parameters(), lr=0.05, weight_decay=0.1, **more)
    for _ in range(9):
        reference.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    options = {"lr": 0.05, "weight_decay": 0.1, "name": name, **more}
    quiet = {"logging__progress": False, "logging__verdict": False, "logging__tensorboard": False}
    plain = {
        "schedule__name": "constant",
        "schedule__warmup_epochs": 0,
        "mode": "single",
        "devices": ["cpu"],
    }
    sets = (inputs, targets), (inputs, targets)
    train(
        model=ours,
        data=sets,
        optimizer=options,
        epochs=9,
        batch_size=40,
        clip_grad_norm=0.5,
        **plain,
        **quiet,
        output=tmp_path / "run",
    )
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "way",
    [
        "ddp",
        pytest.param("dp", marks=pytest.mark.slow),
        pytest.param("one", marks=pytest.mark.slow),
    ],
)
def test_the_trained_blocks_may_change_in_every_mode_with_whole_models(way, unfreezing):
    for name, words in (("single", ["mode=single"]), (way, WAYS[way])):
        ok(*TURNS, *SGD, *words, f"output={unfreezing / name}", cwd=unfreezing)
    assert losses(unfreezing / way) == pytest.approx(losses(unfreezing / "single"), rel=1e-5)
    one, two = (load_file(unfreezing / name / "last.safetensors") for name in ("single", way))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(cases=["words0-requires_grad"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mode=fsdp", "nproc=2"], "requires_grad"),
        pytest.param(
            ["mode=local_sgd", "nproc=2", "local_sgd.outer_momentum=0.9"],
            "local_sgd.outer_lr",
            marks=pytest.mark.slow,
        ),
        (["mode=single", "model.name=late"], "b.weight"),
        pytest.param(
            ["mode=ddp", "nproc=2", "model.name=late"], "b.weight", marks=pytest.mark.slow
        ),
    ],
)
def test_where_it_cannot_change_the_run_ends_before_a_wrong_step(words, says, unfreezing):
    completed = trainer(
        *latest(*TURNS, *SGD, *words), f"output={unfreezing / 'run'}", cwd=unfreezing
    )
    assert (
        completed.returncode == 2
        and says in completed.stderr
        and "Traceback" not in completed.stderr
    )
    assert len(steps(unfreezing / "run")) == 4, "all that came before"


@pytest.mark.slow(cases=["optimizer0-mode=single"])
@pytest.mark.full(cases=["optimizer1-mode=ddp"])
@pytest.mark.parametrize(
    "mode",
    [["mode=single"], pytest.param(["mode=ddp", "nproc=2"], marks=pytest.mark.slow)],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    "optimizer", [ADAMW, pytest.param(["optimizer.name=muon"], marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_the_state_of_layers_that_were_unfrozen(optimizer, mode, unfreezing):
    """Saved in the second epoch and in the third: the optimizer has more than when the model was
    made.
    """
    words = [*TURNS, *optimizer, *mode, "save.every_steps=1"]
    ok(*words, f"output={unfreezing / 'whole'}", cwd=unfreezing)
    kill(7, *words, f"output={unfreezing / 'run'}", cwd=unfreezing)
    ok(*words, "resume=auto", f"output={unfreezing / 'run'}", cwd=unfreezing)
    assert_same_run(unfreezing / "run", unfreezing / "whole")


@pytest.mark.parametrize(
    "mode",
    [["mode=single"], pytest.param(["mode=fsdp", "nproc=2"], marks=pytest.mark.slow)],
    ids=lambda words: words[0],
)
def test_code_of_the_model_does_not_unfreeze_blocks_frozen_by_the_recipe(mode, unfreezing):
    ok(*TURNS, *SGD, "model.freeze=[a,b]", *mode, f"output={unfreezing / 'run'}", cwd=unfreezing)
    first = latest(*TURNS, "optimizer.lr=1e-30", "mode=single", "epochs=1")
    ok(*first, f"output={unfreezing / 'first'}", cwd=unfreezing)
    after, before = (load_file(unfreezing / name / "last.safetensors") for name in ("run", "first"))
    assert torch.equal(after["b.weight"], before["b.weight"])
    assert not torch.equal(after["out.bias"], before["out.bias"])

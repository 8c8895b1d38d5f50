"""Unequal shares of every batch, through the command line: the maths of `single`, and of a plain
loop of workers.
"""

import copy
import re
from functools import cache
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.command_line import QUIET, losses, ok, result, suggested, trainer
from tests.modes.ways import FP32, SHALLOW, SMALL, TWICE, assert_same_training, distances, tensors
from trainer.data import (
    DataShare,
    Example,
    Loader,
    TensorSpec,
    count_steps_per_epoch,
    open_datasets,
    sampling,
)
from trainer.errors import RecipeError
from trainer.memory.needs import count_fitting_images
from trainer.modes import Context, Strategy
from trainer.recipe import TRAITS, load
from trainer.recipe.checks import check_processes
from trainer.recipe.shares import (
    check_shares,
    count_rows,
    divide_in_proportion,
    divide_within_limits,
)
from trainer.training import loop
from trainer.training.initial_model import build_for_dataset
from trainer.training.parts import TrainingPosition
from trainer.training.randomness import seed_everything
from trainer.training.setup import create_task, read_kept_shares

ALL = [
    "accumulate=2",
    "augment.mixup=0.2",
    "augment.cutmix=1.0",
    "clip_grad_norm=0.5",
    "loss.label_smoothing=0.1",
]
# Equal shares are 3e-5 from `single`, too, after fourteen steps at 0.01.
GENTLE = "optimizer.lr=0.001"
NORMALISED = ["model.name=cnn", "sync_bn=true"]
GRAPHS = [
    "plugin=tests.simulated.tape_plugin",
    "graphs=true",
    "loss.class_weights=[1,2,3,1,1,1,0.5,1,1,4]",
]
WAYS = {
    "ddp": ["mode=ddp", "nproc=2", "shares=[3,1]"],
    "fsdp": ["mode=fsdp", "nproc=3", "shares=[5,2,1]"],
    "ddp, all options": ["mode=ddp", "nproc=3", "shares=[1,5,2]", *ALL],
    "fsdp, all options": ["mode=fsdp", "nproc=2", "shares=[0.2,1]", *ALL],
    "ddp, graphs": ["mode=ddp", "nproc=3", "shares=[5,2,1]", "accumulate=2", *GRAPHS],
    "ddp, sync_bn": ["mode=ddp", "nproc=2", "shares=[7,1]", "accumulate=2", *NORMALISED, "seed=2"],
    "fsdp, sync_bn": ["mode=fsdp", "nproc=2", "shares=[7,1]", *NORMALISED],
}
# Seeds 0 and 1 have a step in which rounding changes the sign at a ReLU, with equal shares, too.
SLOW = [way for way in WAYS if way not in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of the same run on one device."""

    @cache
    def trained(*words):
        path = tmp_path_factory.mktemp("single") / "run"
        ok(*words, "mode=single", f"output={path}")
        return path

    many = ("mode", "nproc", "shares", "sync_bn", "graphs", "plugin")
    return lambda words: trained(*(word for word in words if word.partition("=")[0] not in many))


@pytest.mark.full(but=["ddp", "ddp, all options", "ddp, sync_bn"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "ddp")) for way in WAYS]
)
def test_unequal_shares_train_as_single_does(way, single, tmp_path):
    words = [*SMALL, *TWICE, *WAYS[way]]
    run = tmp_path / "run"
    words += (
        SHALLOW if way not in SLOW else [GENTLE] + ["model.name=cnn_gn"] * ("sync_bn" not in way)
    )
    ok(*words, f"output={run}")
    assert len(losses(run)) == 20
    assert_same_training(run, single(words))
    recipe = load(
        None,
        *(
            word
            for word in words
            if "=" in word and not word.startswith(("recipe", "nproc", "plugin"))
        ),
    )
    shares = [recipe.accumulate * rows for rows in count_rows(recipe, len(recipe.shares))]
    assert result(run)["shares"] == shares
    assert sum(shares) == 64
    assert len({*shares}) > 1


LOCAL = [
    "data.name=synthetic",
    "data.image_size=8",
    "data.val_samples=30",
    "data.samples=197",
    "batch_size=32",
    "model.name=cnn_gn",
    "schedule.name=constant",
    "optimizer.lr=0.05",
    "epochs=2",
    "augment.crop=none",
]
LOCAL += ["local_sgd.every=3", "local_sgd.outer_momentum=0", "mode=local_sgd"]


def plain_loop(recipe, rows):
    """Workers one after the other, by hand: their losses of each step, averaged by images, and the
    last weights.

    A part of an epoch does not divide into steps of one size: a worker's images weigh alike in all
    of them.
    """
    seed_everything(recipe.seed, False, False)
    data = open_datasets(recipe)
    whole = recipe.replace(mode="single", batch_size=len(data.train), shares=None)
    task = create_task(recipe, data)
    models = [build_for_dataset(recipe, task, data, starting=True)]
    models += [copy.deepcopy(models[0]) for _ in rows[1:]]
    created = [
        torch.optim.SGD(
            model.parameters(),
            lr=0.05,
            momentum=0.9,
        )
        for model in models
    ]
    loader = Loader(data, whole, task, DataShare(), torch.device("cpu"))
    samples = len(data.train)
    steps = -(-samples // recipe.batch_size)
    collected = []
    finished = 0
    # Rounded to the nearest number.
    sizes = [(2 * samples * part + sum(rows)) // (2 * sum(rows)) for part in rows]
    assert sum(sizes) == samples

    def average():
        with torch.no_grad():
            for weights in zip(*(model.parameters() for model in models), strict=True):
                mean = (
                    sum(size * weight for size, weight in zip(sizes, weights, strict=True))
                    / samples
                )
                for weight in weights:
                    weight.copy_(mean)

    for epoch in range(recipe.epochs):
        [batch] = loader.training(epoch)
        parts = [
            [*zip(inputs.tensor_split(steps), targets.tensor_split(steps), strict=True)]
            for inputs, targets in zip(
                batch.inputs.split(sizes), batch.targets.split(sizes), strict=True
            )
        ]
        for step in range(steps):
            total = 0.0
            for model, optimizer, part, each in zip(models, created, parts, rows, strict=True):
                inputs, targets = part[step]
                loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
                optimizer.zero_grad()
                (loss / (samples / steps * each / sum(rows))).backward()
                optimizer.step()
                total += loss.item()
            collected.append(total * steps / samples)
            finished += 1
            if finished % 3 == 0:
                average()
        average()
    return collected, models[0].state_dict()


@pytest.mark.slow
def test_workers_of_local_sgd_with_unequal_shares_are_those_of_a_plain_loop(tmp_path):
    recipe = load(None, *LOCAL, "shares=[1,5,2]")
    ok(*LOCAL, "shares=[1,5,2]", "nproc=3", *QUIET, f"output={tmp_path / 'run'}")
    expected, weights = plain_loop(recipe, count_rows(recipe, 3))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=FP32)
    apart = distances({"model": tensors(tmp_path / "run")["model"]}, {"model": weights})
    assert apart["model"] < FP32


@pytest.mark.slow
def test_a_run_continues_under_other_shares_as_single(single, tmp_path):
    words = [*SMALL, *TWICE, *SHALLOW]
    reference = single(words)
    words += ["save.every_steps=3"]
    run = tmp_path / "run"
    again = ["resume=auto"]
    for n, way in enumerate(
        [["mode=ddp", "nproc=2", "shares=[3,1]"], ["mode=fsdp", "nproc=3", "shares=[1,2,5]"]]
    ):
        killed = trainer(
            *words,
            *way,
            *again * (n > 0),
            f"output={run}",
            env={"TRAINER_FAULT": f"kill@1:{5 + 9 * n}"},
        )
        assert killed.returncode, killed.stdout
    ok(*words, "mode=ddp", "nproc=2", "shares=[1,7]", *again, f"output={run}")
    assert_same_training(run, reference)


# --------------------------------------------------------------------------------------------------
# measured

MEASURED = [
    *SMALL,
    "plugin=tests.modes.unequal_ranks",
    "model.name=unlike",
    "optimizer.lr=0.01",
    "data.samples=640",
]


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Train with a model that computes an image in the given number of seconds on each rank."""
    folder = tmp_path_factory.mktemp("unlike")

    def train(name, each, *words, start=ok, **faults):
        env = {"FAULTY_EACH": each, **faults}
        start(*MEASURED, *words, f"output={folder / name}", cwd=folder, env=env)
        return folder / name

    return train


@pytest.fixture(scope="module")
def reference(unlike):
    return unlike("single", "0", "mode=single", "epochs=4")


# The shares change at the start of an epoch.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "each", "epochs", "faults"),
    [
        ("fsdp", "0.001,0.003", 4, {}),
        pytest.param("local_sgd", "0.001,0.003", 4, {}, marks=pytest.mark.full),
        # Both are alike at first; from the 40th pass on the second one is throttled, and gets less
        # in the next epoch.
        ("ddp", "0.001,0.001", 9, {"FAULTY_LATER": "40,0.003"}),
    ],
)
def test_measured_shares_follow_speed_and_the_maths_stay(
    mode, each, epochs, faults, unlike, reference
):
    """The second of two ranks needs three times as long for an image: 48 and 16 of 64 would take
    the same time.
    """
    run = unlike(
        f"{mode} {each}",
        each,
        f"mode={mode}",
        "nproc=2",
        "shares=auto",
        f"epochs={epochs}",
        **faults,
    )
    fast, slow = result(run)["shares"]
    assert fast + slow == 64 and 40 <= fast <= 56 and len(losses(run)) == 10 * epochs
    if mode == "fsdp":
        assert_same_training(run, reference)


@pytest.mark.slow
def test_measured_shares_are_kept_for_a_resumed_run(unlike, reference):
    """The run is killed in the fourth epoch, with too few steps left to measure again, so it
    continues with the saved shares.
    """
    words = ["mode=ddp", "nproc=2", "shares=auto", "epochs=4", "save.every_steps=5"]
    run = unlike("ddp", "0.001,0.003", *words, start=trainer, TRAINER_FAULT="kill@1:38")
    assert 30 <= len(losses(run)) < 40
    unlike("ddp", "0.001,0.003", *words, "resume=auto")
    assert 40 <= result(run)["shares"][0] <= 56
    assert_same_training(run, reference)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("option", ["sync_bn", "graphs"])
def test_ranks_that_wait_for_each_other_in_a_pass_cannot_be_timed(option, mode):
    words = [f"mode={mode}", f"{option}=true"]
    with pytest.raises(RecipeError, match=f"{option}=false"):
        check_shares(load(None, *words, "shares=auto"), 2)
    check_shares(load(None, *words, "shares=[3,1]"), 2)


@pytest.mark.parametrize("shares", ["auto", "[3,1]"])
def test_numbers_that_were_typed_are_measured_where_auto_goes_on(shares):
    world = SimpleNamespace(devices=["one", "other"], size=2)
    share = DataShare(0, 2, numbers=(48, 16))
    auto = load(None, "mode=ddp", "shares=auto", "batch_size=64")
    state = SimpleNamespace(strategy=SimpleNamespace(share=share), step_offset=0, total_steps=9)
    resolved = SimpleNamespace(
        recipe=auto.replace(shares=load(None, f"shares={shares}").shares), steps_per_epoch=9
    )
    resolved.world, resolved.tracker = world, SimpleNamespace(say=print)
    saved = SimpleNamespace(facts=TrainingPosition(resolved, state).facts())
    assert read_kept_shares(auto, saved, world) == ((48, 16) if shares == "auto" else ())


def test_later_measurements_use_the_new_shares():
    """The passes of zeros for the verdict are an example; ranks would wait for each other with the
    old shares.
    """
    recipe = load(None, "mode=ddp", "shares=auto", "batch_size=64")
    share = DataShare(1, 2)
    run = MagicMock()
    run.resolved.recipe = recipe
    run.resolved.world.devices = ["one", "other"]
    example = Example(32, TensorSpec((1, 8, 8), torch.float32))
    run.strategy = Strategy(
        Context(
            recipe,
            SimpleNamespace(device=torch.device("cpu"), size=2),
            None,
            example,
            64,
            share,
        )
    )
    run.state.strategy = run.strategy
    watch = SimpleNamespace(
        first=lambda rows, divide: [48, 16],
        speeds=[3.0, 1.0],
    )
    run.observer.noticed.shares = watch
    assert loop.update_shares(run, epoch_begins=True) and run.strategy.context.example.rows == 16


# --------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize("mode", TRAITS)
def test_numbers_are_refused_where_measured_ones_are(mode):
    recipe = load(None, f"mode={mode}", "shares=[3,1]")
    reason = TRAITS[mode].refuses.get("shares")
    if reason is None:
        return check_processes(recipe, 2)
    with pytest.raises(RecipeError, match=re.escape(reason)):
        check_processes(recipe, 1 if TRAITS[mode].processes == "one" else 2)


BAD = [
    "[0,1]",
    "[-1,1]",
    "[.nan,1]",
    "[.inf,1]",
    "[1e300,1]",
    "[3]",
    "[]",
    "3",
    "fast",
    "[true,1]",
    "[a,b]",
    "[[3],1]",
]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("typed", [True, False])
def test_invalid_shares_are_refused_with_an_example(value, typed, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"shares: {value}\n")
    with pytest.raises(RecipeError, match=r"shares=.*\b1e-06 to 1e\+06 .*\[3, 1\]"):
        load(None, f"shares={value}") if typed else load(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["shares=[3,1]"], 1),
        (["shares=[3,1]"], 3),
        (["shares=[3,1,1]"], 2),
        (["shares=[1000,1]"], 2),
        (["shares=[40,1]", "batch_size=12", "accumulate=2", "augment.mixup=0.2"], 2),
        (["shares=[1000000,0.000001]"], 2),
        (["shares=auto", "sync_bn=true"], 2),
    ],
)
def test_impossible_shares_are_refused_with_working_arguments(words, processes):
    with pytest.raises(RecipeError) as caught:
        check_processes(load(None, *words), processes)
    advice = suggested(str(caught.value).replace(" or ", " or type "))
    assert advice, caught.value
    for word in advice:
        key, _, value = word.partition("=")
        kept = [each for each in words if not each.startswith(f"{key}=")]
        kept = kept if key == "nproc" else [*kept, word]
        check_processes(load(None, *kept), int(value) if key == "nproc" else processes)


def test_portions_add_up_and_keep_within_bounds():
    assert divide_in_proportion(10, [1, 1, 1]) == [4, 3, 3]
    assert divide_in_proportion(7, [0.3, 0.1]) == [5, 2]
    assert divide_within_limits(64, [9, 1], 1, [40, 64]) == [40, 24]
    assert divide_within_limits(8, [100, 1, 1], 1, [8, 8, 8]) == [6, 1, 1]
    assert divide_within_limits(
        10,
        [6, 3.9, 0.1],
        1,
        [5, 10, 10],
    ) == [5, 4, 1]


def test_a_device_gets_no_more_than_it_holds():
    """The device has 900 of 1,000 bytes in use: 100 remain free, and 10 images needed 200 more."""
    assert count_fitting_images(1000, 1, 100, 300, 10) == 40
    assert count_fitting_images(1000, 2, 100, 300, 10) == 17, "two ranks on one card"
    assert count_fitting_images(1000, 1, 800, 900, 10) == 10, "never less than it has now"


def test_a_worker_that_gets_no_image_in_a_step_is_refused():
    """The 65 images make two steps: of the second rank's two images one step has one, and of its
    single image a step has none.
    """
    recipe = load(None, "mode=local_sgd", "batch_size=64", "shares=[63,1]")
    with pytest.raises(RecipeError, match="leave micro-batches empty"):
        count_steps_per_epoch(
            65,
            recipe,
            DataShare(0, 2, every_sample=True, numbers=(63, 1)),
        )
    assert (
        count_steps_per_epoch(
            128,
            recipe,
            DataShare(0, 2, every_sample=True, numbers=(63, 1)),
        )
        == 2
    )
    assert sampling.compute_span(128, 1, 2, [63, 1]) == (126, 128)

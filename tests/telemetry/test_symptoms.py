"""Sentences at their limits: the case that is reported, and a close case that is not."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.command_line import suggested
from trainer.devices.host import Strain
from trainer.recipe import load
from trainer.telemetry.rank_watch import FEW, WINDOW, WINDOWS, RankWatch
from trainer.telemetry.symptoms import RunState, describe_slow_rank, find_symptoms

GUESS = math.log(10)
WELL = {
    "over": True,
    "step": 600,
    "steps": 600,
    "epoch_steps": 100,
    "classes": 10,
    "names": list("abcdefghij"),
    "losses": [1.2, 0.5, 0.3, 0.25, 0.22, 0.2],
    "validation": [{"loss": 0.3, "top1": 0.92}] * 3,
    "labelled": True,
    "actual": [40] * 10,
    "predicted": [42, 38] * 5,
    "before": [40] * 10,
}
STUCK = {"validation": [{"loss": GUESS, "top1": 0.1}] * 3, "losses": [GUESS] * 6}
HEART = {"losses": [1, 0.4, 0.1, 0.04, 0.03, 0.02], "validation": [{"loss": 1, "top1": 0.7}] * 3}
GUESSED = {"predicted": [0, 44] + [44] * 8, "before": [0, 44] + [44] * 8}


def told(*words, **changes):
    recipe = load(None, *words)
    actual = find_symptoms(RunState(**{**WELL, **changes}), recipe)
    for remedy in suggested(" ".join(actual.values())):
        key = remedy.partition("=")[0]
        load(None, *(word for word in words if not word.startswith(f"{key}=")), remedy)
    return actual


def test_a_run_that_is_well():
    assert told() == {}


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ([7, 9, 10, 12], "guessing (2.30)"),
        ([7, 30, 12, 11], "guessing (2.30)"),  # falls again, and not below where it was
        ([7, 5, 4, 3], ""),  # falls
        ([2.5, 2.48, 2.5], ""),  # fresh weights that learn slowly
        ([9], ""),
        ([2.2, 0.4, 0.7, 1.3], ""),  # still better than guessing
        ([2.2, math.inf, 3, 4], ""),
    ],
)
def test_the_loss(losses, kind):
    actual = told(losses=losses)
    assert kind in actual.get("loss", "") and bool(kind) == ("loss" in actual)


def test_the_loss_in_the_warm_up():
    assert "loss" not in told(losses=[7, 9, 8], warmup=200)
    assert "loss" in told(losses=[7, 9, 10], warmup=100)
    assert "guessing (2.30)" in told(losses=[7, 0.7, 9, 3], warmup=900)["loss"]


def test_a_loss_of_another_kind():
    """Only a loss that undoes all learning is reported, because guessing has no known loss."""
    plain = {
        "classes": None,
        "actual": (),
        "predicted": (),
        "before": (),
        "validation": [{"loss": 12.0}] * 3,
    }
    assert told(**plain, losses=[70, 90, 100]) == {}
    assert told(**plain, losses=[70, 40, 50, 61]) == {}
    assert re.search(r"\(70\).*\b90\b", told(**plain, losses=[70, 40, 60, 90])["loss"])
    assert told(**plain, losses=[-1, -4, -3, -0.5]) == {}


def test_the_rate_that_is_tried_is_one_that_the_recipe_takes():
    assert (
        suggested(told("optimizer.lr=0.00002", losses=[7, 9, 10])["loss"])[0]
        == "optimizer.lr=2e-06"
    )
    kept = told("optimizer.lr=0.5", "schedule.min_lr=0.1", "clip_grad_norm=1", losses=[7, 9, 10])[
        "loss"
    ]
    assert suggested(kept) == [] and "lower optimizer.lr" in kept


def test_accuracy_at_the_share_of_the_largest_class():
    assert suggested(told(**STUCK)["accuracy"]) == ["optimizer.lr=0.01", "optimizer.lr=1"]
    uneven = {
        "actual": [310] + [10] * 9,
        "predicted": [400] + [0] * 9,
        "before": [400] + [0] * 9,
    }
    ninety = {"validation": [{"loss": 1.0, "top1": 0.775}] * 3, "losses": [1.0] * 6}
    assert suggested(told(**uneven, **ninety)["accuracy"])[0] == "data.balance=true"


def test_training_is_perfect_and_validation_is_not():
    actual = told(**HEART)
    assert "top-1 70%" in actual["memorised"]
    assert "augment.mixup=0.2" in suggested(actual["memorised"])
    smooth = [0.55, 0.52, 0.51, 0.505, 0.504, 0.503]  # The targets' own entropy is 0.5003.
    assert "memorised" in told("loss.label_smoothing=0.1", **{**HEART, "losses": smooth})


def test_a_class_that_is_never_predicted():
    actual = told(**GUESSED)["never predicted"]
    assert re.search(r"\ba, .*\b40\b", actual)
    assert "data.balance=true" in suggested(actual)
    balanced = told("data.balance=true", **GUESSED)["never predicted"]
    unlabelled = told(**GUESSED, labelled=False)["never predicted"]
    for text in (balanced, unlabelled):
        assert suggested(text) == []
        assert "labels" in text


SLOWLY = [{"loss": loss, "top1": 0.1} for loss in (2.3, 2.25, 2.2)]


# The weighting makes rare classes right and common ones wrong.
@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        (
            "accuracy",
            STUCK | {"validation": [{"loss": GUESS, "top1": 0.13}] * 3},
            [],
        ),  # better than guessing
        ("accuracy", STUCK | {"validation": SLOWLY}, []),
        ("accuracy", STUCK | {"losses": [1.5] * 6}, []),  # has learned the training images
        ("accuracy", STUCK | {"validation": [{"loss": GUESS, "top1": 0.1}] * 2}, []),
        ("accuracy", STUCK | {"step": 40}, []),
        ("accuracy", STUCK | {"warmup": 580}, []),
        ("accuracy", STUCK | {"actual": [4] * 10}, []),
        (
            "accuracy",
            STUCK,
            ["loss.class_weights=balanced"],
        ),
        ("memorised", HEART | {"validation": [{"loss": 0.3, "top1": 0.91}] * 3}, []),
        ("memorised", HEART | {"losses": [1, 0.4, 0.1, 0.09, 0.08, 0.02]}, []),
        ("memorised", HEART | {"step": 40}, []),
        ("memorised", HEART | {"classes": None}, []),
        ("memorised", HEART, ["augment.mixup=0.2"]),
        ("memorised", HEART, ["augment.cutmix=1"]),
        ("memorised", HEART | {"losses": [0.6] * 6}, ["loss.label_smoothing=0.1"]),
        # A class that may still appear.
        ("never predicted", GUESSED | {"before": [1, 43] + [44] * 8}, []),
        ("never predicted", GUESSED | {"before": ()}, []),
        ("never predicted", GUESSED | {"actual": [19] + [44] * 9}, []),
        ("never predicted", GUESSED | {"over": False, "steps": 2000}, []),
        ("never predicted", GUESSED | {"step": 40}, []),
        (
            "never predicted",
            GUESSED | {"validation": [{"loss": 2.2, "top1": 0.14}] * 3},
            [],
        ),  # hardly known yet
    ],
)
def test_close_cases_are_not_reported(kind, facts, words):
    assert kind not in told(*words, **facts)


def test_the_machine():
    assert "55%" in told(strain=Strain(9.0, 0.55))["cores"]
    assert suggested(told(strain=Strain(9.0, 0.55), threads=2)["cores"]) == ["threads=1"]
    assert suggested(told(strain=Strain(9.0, 0.55))["cores"]) == []
    assert told(strain=Strain(9.0, 0.15)) == told(strain=Strain(0.5, 0.55)) == {}


def test_one_cause_gets_one_word():
    assert told(**{**STUCK, "losses": [7, 9, 10]}).keys() == {"loss"}
    assert told(**{**HEART, **GUESSED}).keys() == {"never predicted"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), r"\b0\.6 times .*shares=auto .*\b1\.33 times "),
        (("shares=auto",), "next epoch"),
        (("shares=[3,1]",), "try shares=auto"),
    ],
)
def test_the_line_about_a_slow_rank_has_the_gain_of_shares(words, says):
    """Two ranks, one of them 0.6 times as fast: equal local batches reach 2 x 0.6 and unequal ones
    1.6.
    """
    watch = RankWatch()
    for _ in range(WINDOWS * FEW):
        watch.add(WINDOW, [[1.0, 0.0, 0.2], [1.0, 0.0, 0.2 / 0.6]])
    lag = watch.named()
    message = describe_slow_rank(lag, "here, cuda:1", load("digits", *words))
    assert re.search(says, message)
    assert "shares" not in describe_slow_rank(
        replace(lag, data=True), "here, cuda:1", load("digits")
    ), "images come late"


def test_a_run_that_ends_before_its_first_epoch_has_evaluations_of_no_epoch():
    assert "class" not in " ".join(told(**GUESSED, validation=[]))

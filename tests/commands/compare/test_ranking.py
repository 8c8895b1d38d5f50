"""Losses compared with those of single."""

from tests.commands.trials.stand_in import listed
from trainer.commands.compare.entries import find_batch_dependent
from trainer.commands.compare.ranking import compare_losses
from trainer.recipe import load

LOSSES = [2.0, 1.5, 1.0]


def found_of(entry, losses, reference, parts=(), rounded=()):
    """Return the result for an entry with these losses."""
    entry.losses = losses
    if reference is not None:
        reference.losses = LOSSES
        reference.parts = parts
        reference.rounded = rounded
    return compare_losses(entry, reference)


def test_exactness():
    entries_by_name = listed(
        modes=["single", "ddp", "local_sgd", "ddp precision=bf16", "ddp accumulate=2"]
    )
    single, ddp, local, half, pieces = entries_by_name.values()

    def verdict(entry, factor=1.0, parts=(), reference=single):
        return found_of(entry, [factor * loss for loss in LOSSES], reference, parts).verdict

    assert verdict(single) == "reference"
    assert [verdict(ddp), verdict(pieces, 1.00009), verdict(ddp, 0.99991)] == ["exact"] * 3
    assert verdict(ddp, 1.001) == "disagrees"
    assert (
        found_of(
            ddp,
            [2.0, float("nan"), 1.0],
            single,
            ["batch norm"],
        ).verdict
        == "disagrees"
    )
    assert verdict(ddp, 1.05, ["batch norm"]) == "differs"
    assert verdict(ddp, 2.1, ["batch norm"]) == "disagrees"
    assert verdict(local, 1.2) == "other maths"
    assert verdict(half) == "not compared" and "precision" in found_of(half, LOSSES, single).text
    # Both checked in fp32.
    one, two = listed(modes=["single precision=tf32", "ddp precision=tf32"]).values()
    assert [verdict(two, reference=one), verdict(two, 1.0002, reference=one)] == [
        "exact",
        "disagrees",
    ]
    assert verdict(ddp, reference=None) == "not compared"
    assert found_of(ddp, [], single).text == "-"


def test_differences_by_rounding_are_accepted_up_to_a_bound():
    single, ddp = listed(modes=["single", "ddp"]).values()

    def verdict(factor, rounded):
        losses, again = ([part * loss for loss in LOSSES] for part in (factor, rounded))
        return found_of(ddp, losses, single, rounded=again).verdict

    assert verdict(1.0007, 1.0) == verdict(1.0009, 1.0002) == "disagrees"
    assert verdict(1.0007, 1.0002) == "exact"
    assert [verdict(1.009, 2.0), verdict(1.011, 2.0)] == ["exact", "disagrees"], (
        "whatever rounding does: 1 % at most"
    )


def test_entries_that_depend_on_the_division_of_a_batch():
    def parts(name):
        return find_batch_dependent(load("digits", f"model.name={name}", "data.channels=3"))

    assert parts("cnn") == parts("resnet18") == ["batch norm"]
    assert parts("cnn_gn") == parts("vit_tiny") == []
    assert parts("efficientnet_b0") == ["batch norm", "dropout"] and parts("alexnet") == ["dropout"]

"""Plans that were measured on a machine are taken again there, for the same model on the same devices."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from tests.contexts import mode_of
from trainer.models.zoo import build
from trainer.modes.pipeline import stages
from trainer.modes.pipeline.tuning import Trial
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import load

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """The numbers of micro-batches that are tried, each faster than a smaller one, in place of measurements."""
    counts = []

    def trial(strategy, traced, plan):
        counts.append(plan.microbatches)
        strategy.plan = plan
        return Trial(1 / plan.microbatches, (1.0, 1.0))

    monkeypatch.setattr(stages.Staged, "trial", trial)
    return counts


def run(*words, frozen=False):
    """A pipeline over two stand-ins, set up; and what it says."""
    said = []
    recipe = load({"mode": "pipeline", "model": {"name": "mlp"}, "batch_size": 48}, *words)
    model = build(recipe.model, 10, 1, 8)
    if frozen:
        next(model.parameters()).requires_grad_(False)
    world = World(Place(), CPU, 1, ("cpu", "cpu"), (CPU, CPU))
    strategy = mode_of(recipe, world, (recipe.batch_size, 1, 8, 8), say=said.append)
    strategy.setup(model)
    return strategy, " ".join(said)


def kept():
    return [*Path(os.environ["TRAINER_DATA"]).glob("pipelines/*")]


def test_what_was_measured_is_taken_again_and_can_be_removed(tried):
    first, _ = run()
    (file,) = kept()
    measured = len(tried)
    second, said = run()
    assert measured and len(tried) == measured and second.plan == first.plan
    assert second.known == json.loads(json.dumps(first.known))
    command, path = said.split()[-2:]
    assert (command, path) == ("rm", str(file))
    file.unlink()
    run()
    assert len(tried) > measured


@pytest.mark.parametrize("damage", ["", "{}", '{"plan": 3}', "a text", '{"key": "another"}'])
def test_a_damaged_file_is_measured_anew(damage, tried):
    run()
    (file,) = kept()
    file.write_text(damage)
    measured = len(tried)
    run()
    assert len(tried) > measured and json.loads(file.read_text())["stable"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        *("batch_size=96", "precision=bf16", "compile=true", "channels_last=false", "model.name=cnn_gn"),
        *("pipeline.recompute=true", "frozen", "another processor"),
    ],
)
def test_another_pipeline_is_measured(changed, tried, monkeypatch):
    monkeypatch.setattr(stages.Staged, "build", lambda *_: None)
    run()
    measured = len(tried)
    if changed == "another processor":
        monkeypatch.setattr("trainer.modes.pipeline.kept_plans.processor", lambda: changed)
    run(*[changed] * ("=" in changed), frozen=changed == "frozen")
    assert len(tried) > measured and len(kept()) == 2


def test_what_is_typed_is_neither_measured_nor_kept(tried):
    run("pipeline.microbatches=4")
    assert not tried and not kept()


def test_a_choice_that_is_not_stable_is_not_kept(monkeypatch):
    seconds = itertools.count(1000, -1)  # whatever is tried is faster than all before

    def trial(strategy, traced, plan):
        strategy.plan = plan
        return Trial(next(seconds), (1.0, 1.0))

    monkeypatch.setattr(stages.Staged, "trial", trial)
    strategy, _ = run()
    assert not strategy.known["stable"] and not kept()


def test_a_folder_that_cannot_be_written_stops_nothing(monkeypatch, tried):
    monkeypatch.setenv("TRAINER_DATA", "/dev/null")
    run()
    assert tried

"""`recompute=auto`: as few first blocks as fit, by shapes alone; and what a plan says of it, by the storages that are
alive."""

from types import SimpleNamespace

import pytest
import torch

from tests.commands.plan.plans import alone, dataset_facts, fake_of, real, recipe_of
from tests.commands.plan.sharded_memory import Alive
from trainer import load_recipe, plan
from trainer.commands.plan.planned_layout import lay_out
from trainer.commands.plan.planned_memory import footprint
from trainer.errors import RecipeError
from trainer.models.recompute import recompute, runs_of
from trainer.models.zoo import build
from trainer.optim.optimizers import build_optimizer, optimizer_state
from trainer.training import memory_needs
from trainer.training.memory_needs import blocks_needed, settled
from trainer.training.state import Resolved

WORDS = ["mode=single", "model.name=resnet20", "data.name=synthetic", "data.image_size=32", "batch_size=32"]
MIB = 2**20


def made(*words):
    recipe = recipe_of(*WORDS, *words)
    return build(recipe.model, 10, 3, 32), recipe, dataset_facts(recipe).example(32)


def peak(count, recomputed):
    """Most bytes alive in a step of plain SGD, with so many first blocks recomputed."""
    strategy, batch = real(recipe_of(*WORDS, f"recompute={recomputed}"), alone())
    if recomputed == "false":
        recompute(strategy.module, runs_of(strategy.module)[:count])
    parameters = strategy.named_parameters()
    optimizer = build_optimizer(parameters, strategy.recipe.optimizer)
    state = [*optimizer_state(optimizer, parameters).values()]
    with Alive([*parameters.values(), *strategy.module.buffers(), *state, batch.inputs, batch.targets], bool) as alive:
        strategy.forward_backward(batch, 1 / 32)
    return alive.peak


@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_a_plan_says_what_is_alive(recomputed):
    recipe = recipe_of(*WORDS, f"recompute={recomputed}")
    (device,) = footprint(fake_of(recipe), lay_out(recipe))
    found = peak(0, recomputed)
    assert device.peak == pytest.approx(found, rel=0.1)
    said = plan(load_recipe(None, *WORDS, f"recompute={recomputed}"))["peak_without_recompute"]
    assert said is None if recomputed == "false" else found < 0.6 * said


@pytest.mark.slow
def test_as_few_blocks_as_fit():
    model, recipe, example = made()
    every = len(runs_of(model))
    rooms = [1, 40 * MIB, 1 << 40]
    counts = [blocks_needed(model, recipe, example, room, 1) for room in rooms]
    assert every == counts[0] > counts[1] > counts[2] == 0
    assert peak(counts[1], "false") < 1.1 * rooms[1] < 1.35 * peak(counts[1] - 1, "false")


def run(room, monkeypatch, *words):
    """What training settles on a GPU with so much free memory."""
    model, recipe, _ = made(*words)
    monkeypatch.setattr(memory_needs, "free_memory", lambda device: room)
    world = SimpleNamespace(device=torch.device("cuda"), size=1, sharing=lambda: 1, max_=lambda values: values)
    parts = SimpleNamespace(count=1)
    resolved = Resolved(recipe, dataset_facts(recipe), None, world, parts, 1, None, None, {}, False, False)
    return settled(resolved, model)


@pytest.mark.slow
def test_a_run_decides_for_all(monkeypatch):
    resolved = run(MIB, monkeypatch, "recompute=auto")
    assert resolved.recipe.recompute is True and resolved.recomputed == len(runs_of(made()[0]))
    resolved = run(1 << 40, monkeypatch, "recompute=auto")
    assert resolved.recipe.recompute is False and resolved.recomputed == 0
    for word in ("graphs=true", "compile=true"):
        assert run(MIB, monkeypatch, "recompute=auto", word).recomputed


@pytest.mark.slow
def test_a_plan_decides_alike():
    """Of the smaller card CUDA leaves 40 MiB."""
    small, large = (plan(load_recipe(None, *WORDS, "recompute=auto"), memory=memory) for memory in ("640MiB", "24GiB"))
    assert small["peak"] < 40 * MIB < small["peak_without_recompute"]
    assert large["peak_without_recompute"] is None
    with pytest.raises(RecipeError, match="recompute=true, or recompute=false"):
        plan(load_recipe(None, *WORDS[1:], "mode=split", "recompute=auto", "devices=[cpu,cpu]"))

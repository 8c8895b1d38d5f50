"""`recompute=auto` chooses as few of the first blocks as fit, by shapes alone; the plan's numbers
equal the storages that are alive.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.commands.plan.plans import alone, create_fake_model, read_dataset_facts, real, recipe_of
from tests.commands.plan.sharded_memory import Alive
from trainer import load_recipe, plan
from trainer.commands.plan.planned_layout import lay_out
from trainer.errors import RecipeError
from trainer.memory.prediction import footprint
from trainer.models.recompute import list_runs, recompute
from trainer.models.shapes import build_on_meta
from trainer.models.zoo import build
from trainer.optim.optimizers import build_optimizer, name_optimizer_state
from trainer.training import memory_keys
from trainer.training.memory_keys import choose_recompute, count_blocks_to_recompute
from trainer.training.state import Opened

WORDS = [
    "mode=single",
    "model.name=resnet20",
    "data.name=synthetic",
    "data.image_size=32",
    "batch_size=32",
]
MIB = 2**20


def made(*words):
    recipe = recipe_of(*WORDS, *words)
    return build(recipe.model, 10, 3, 32), recipe, read_dataset_facts(recipe).example(32)


def peak(count, recomputed):
    """Return the maximum number of bytes alive in a step of plain SGD with `count` first blocks
    recomputed.
    """
    strategy, batch = real(recipe_of(*WORDS, f"recompute={recomputed}"), alone())
    if recomputed == "false":
        recompute(strategy.module, list_runs(strategy.module)[:count])
    parameters = strategy.named_parameters()
    optimizer = build_optimizer(parameters, strategy.recipe.optimizer)
    state = [*name_optimizer_state(optimizer, parameters).values()]
    with Alive(
        [
            *parameters.values(),
            *strategy.module.buffers(),
            *state,
            batch.inputs,
            batch.targets,
        ],
        bool,
    ) as alive:
        strategy.forward_backward(batch, 1 / 32)
    return alive.peak


@pytest.mark.slow(cases=["true", "false"])
@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_a_plan_has_the_memory_of_live_storages(recomputed):
    recipe = recipe_of(*WORDS, f"recompute={recomputed}")
    (device,) = footprint(create_fake_model(recipe), lay_out(recipe))
    actual = peak(0, recomputed)
    assert device.peak == pytest.approx(actual, rel=0.1)
    message = plan(load_recipe(None, *WORDS, f"recompute={recomputed}"))["peak_without_recompute"]
    assert message is None if recomputed == "false" else actual < 0.6 * message


@pytest.mark.slow
def test_the_fewest_blocks_that_fit_are_recomputed():
    model, recipe, example = made()
    every = len(list_runs(model))
    rooms = [1, 40 * MIB, 1 << 40]
    counts = [count_blocks_to_recompute(model, recipe, example, room, 1) for room in rooms]
    assert every == counts[0] > counts[1] > counts[2] == 0
    assert peak(counts[1], "false") < 1.1 * rooms[1] < 1.35 * peak(counts[1] - 1, "false")


def choose(room, monkeypatch, *words, build_on_meta=build_on_meta):
    """Recipe and recomputed blocks that training chooses on a GPU with `room` free bytes."""
    recipe = recipe_of(*WORDS, *words)
    monkeypatch.setattr(memory_keys, "free_memory", lambda device: room)
    monkeypatch.setattr(memory_keys, "build_on_meta", build_on_meta)
    monkeypatch.setattr(memory_keys, "build_for_dataset", lambda *_, starting: made(*words)[0])
    world = SimpleNamespace(
        device=torch.device("cuda"),
        size=1,
        sharing=lambda: 1,
        max_=lambda values: values,
        all_or_none=lambda make: make(),
    )
    share = SimpleNamespace(count=1)
    opened = Opened(
        recipe,
        read_dataset_facts(recipe),
        None,
        world,
        share,
        1,
        None,
        None,
        {},
        False,
        False,
        None,
    )
    return choose_recompute(opened)


@pytest.mark.slow
def test_a_run_decides_for_all(monkeypatch):
    blocks = len(list_runs(made()[0]))
    recipe, recomputed = choose(MIB, monkeypatch, "recompute=auto")
    assert (recipe.recompute, recomputed) == (True, blocks)
    recipe, recomputed = choose(1 << 40, monkeypatch, "recompute=auto")
    assert (recipe.recompute, recomputed) == (False, 0)
    for word in ("graphs=true", "compile=true"):
        assert choose(MIB, monkeypatch, "recompute=auto", word)[1]


@pytest.mark.slow
def test_a_model_that_needs_values_is_counted_with_them(monkeypatch):
    counted = choose(40 * MIB, monkeypatch, "recompute=auto")
    refuse = lambda make: (None, "its code needs values")  # noqa: E731
    with_values = choose(40 * MIB, monkeypatch, "recompute=auto", build_on_meta=refuse)
    assert 0 < with_values[1] == counted[1]


@pytest.mark.slow
def test_a_plan_decides_alike():
    """CUDA leaves 40 MiB of the smaller card."""
    small, large = (
        plan(load_recipe(None, *WORDS, "recompute=auto"), memory=memory)
        for memory in ("640MiB", "24GiB")
    )
    assert small["peak"] < 40 * MIB < small["peak_without_recompute"]
    assert large["peak_without_recompute"] is None
    with pytest.raises(RecipeError, match="recompute=true, or recompute=false"):
        plan(load_recipe(None, *WORDS[1:], "mode=split", "recompute=auto", "devices=[cpu,cpu]"))

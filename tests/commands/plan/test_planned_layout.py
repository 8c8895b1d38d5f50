"""Who would compute what, on machines that are not here."""

import pytest

from trainer import load_recipe
from trainer.commands.plan.planned_layout import lay_out
from trainer.processes import resources


@pytest.mark.parametrize(
    ("words", "nproc", "devices"),
    [
        (["mode=ddp"], 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (["mode=split"], None, ["cuda:0", "cuda:1"]),
        (["mode=pipeline", "pipeline.stages=3"], 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (["mode=single"], None, ["cuda:0"]),
        (["mode=hogwild"], 2, ["cpu:0", "cpu:1"]),
        (["mode=local_sgd", "devices=[cuda]"], 2, ["cuda:0#0", "cuda:0#1"]),
    ],
)
def test_a_machine_with_one_gpu_plans_for_more(monkeypatch, words, nproc, devices):
    monkeypatch.setattr(resources, "cuda_count", lambda: 1)
    recipe = load_recipe(None, "data.name=synthetic", "batch_size=96", *words)
    assert list(lay_out(recipe, nproc).devices) == devices

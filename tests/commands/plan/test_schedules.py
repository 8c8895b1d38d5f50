"""Pipelines before they run: their stages and what these send."""

import pytest

from trainer import load_recipe, plan


def resnet(*words):
    base = [
        "mode=pipeline",
        "model.name=resnet18",
        "data.name=synthetic",
        "data.image_size=64",
        "batch_size=64",
    ]
    return plan(load_recipe(None, *base, "pipeline.microbatches=8", *words), nproc=2)


@pytest.mark.slow
def test_stages_add_up_and_share_the_work():
    actual = resnet()
    pipe = actual["pipeline"]
    assert pipe["balanced_by"] == "flops" and len(pipe["cuts"]) == 1
    flops = actual["model"]["forward_flops_per_image"]
    assert sum(stage["forward_flops"] for stage in pipe["stages"]) == flops * pipe["rows"]
    assert sum(stage["parameters"] for stage in pipe["stages"]) == actual["model"]["parameters"]
    assert max(stage["flops_share"] for stage in pipe["stages"]) < 0.6
    assert pipe["bubble_ideal"] == pytest.approx(1 / 9)
    assert actual["communication"]["crossing_bytes"] == 2 * 8 * pipe["stages"][0]["sent_bytes"]


@pytest.mark.parametrize(
    ("precision", "width"), [pytest.param("fp32", 4, marks=pytest.mark.slow), ("bf16", 2)]
)
def test_tensors_that_cross_a_cut_are_counted(precision, width):
    actual = resnet("pipeline.cuts=[layer2.1]", f"precision={precision}")
    assert actual["pipeline"]["stages"][0]["sent_bytes"] == 8 * 128 * 8 * 8 * width


def test_replicas_of_pipelines_reduce_their_gradients():
    words = [
        "mode=pipeline",
        "model.name=cnn",
        "data.name=synthetic",
        "batch_size=64",
        "pipeline.stages=2",
    ]
    planned = plan(load_recipe(None, *words), nproc=4)
    assert planned["batch"]["shards"] == 2
    largest = max(device["gradients"] for device in planned["memory_per_device"])
    assert planned["communication"]["all_reduce_bytes_per_device"] == largest

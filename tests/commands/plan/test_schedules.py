"""Pipelines before they run, against torch's own schedules."""

import pytest

from tests.commands.plan.plans import recipe_of
from trainer import load_recipe, plan
from trainer.commands.plan import schedules
from trainer.commands.plan.planned_layout import lay_out
from trainer.modes.pipeline.torch_schedules import pipeline_order


@pytest.mark.parametrize(
    ("schedule", "virtual", "microbatches", "flying"),
    [
        ("split", 1, 1, [1, 1]),
        ("gpipe", 1, 8, [8, 8]),
        ("1f1b", 1, 8, [2, 1]),
        ("streams", 1, 8, [2, 1]),
        ("interleaved1f1b", 2, 8, [5, 3]),
        ("loopedbfs", 2, 8, [16, 16]),
        ("interleavedzerobubble", 2, 8, [4, 4]),
        ("zbv", 2, 8, [4, 4]),
        ("dualpipev", 2, 8, [5, 5]),
    ],
)
def test_orders_are_torchs(schedule, virtual, microbatches, flying):
    listed = pipeline_order(schedule, 2, virtual, microbatches)
    assert [schedules.in_flight(actions) for actions in listed] == flying
    done = [(action.stage, action.microbatch) for actions in listed for action in actions if action.kind == "F"]
    assert sorted(done) == [(stage, m) for stage in range(2 * virtual) for m in range(microbatches)]


def test_bubbles_of_equal_stages():
    found = {(row.schedule, row.microbatches): row for row in schedules.bubbles(pipeline_of(4))}
    for schedule in ("gpipe", "1f1b"):
        assert found[schedule, 8].bubble == pytest.approx(3 / 11)
    assert found["interleaved1f1b", 8].bubble == pytest.approx(3 / 19)
    if "zbv" in schedules.SCHEDULES:
        assert found["zbv", 8].bubble < found["interleaved1f1b", 8].bubble
    assert found["1f1b", 16].in_flight == 4
    assert ("dualpipev", 4) not in found  # fewer micro-batches than stages


def pipeline_of(ranks, *words):
    return lay_out(
        recipe_of("model.name=resnet18", "batch_size=64", "data.image_size=64", *words).replace(mode="pipeline"), ranks
    )


def test_stages_add_up_and_share_the_work():
    words = ["mode=pipeline", "model.name=resnet18", "data.name=synthetic", "data.image_size=64", "batch_size=64"]
    found = plan(load_recipe(None, *words, "pipeline.microbatches=8"), nproc=2)
    pipe = found["pipeline"]
    assert pipe["balanced_by"] == "flops" and len(pipe["cuts"]) == 1
    flops = found["model"]["forward_flops_per_image"]
    assert sum(stage["forward_flops"] for stage in pipe["stages"]) == flops * pipe["rows"]
    assert sum(stage["parameters"] for stage in pipe["stages"]) == found["model"]["parameters"]
    assert max(stage["flops_share"] for stage in pipe["stages"]) < 0.6
    assert pipe["bubble_ideal"] == pytest.approx(1 / 9)
    assert found["communication"]["crossing_bytes"] == 2 * 8 * pipe["stages"][0]["sent_bytes"]


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_what_crosses_a_cut(precision, width):
    words = ["mode=pipeline", "model.name=resnet18", "data.name=synthetic", "data.image_size=64", "batch_size=64"]
    words += ["pipeline.microbatches=8", "pipeline.cuts=[layer2.1]", f"precision={precision}"]
    found = plan(load_recipe(None, *words), nproc=2)
    assert found["pipeline"]["stages"][0]["sent_bytes"] == 8 * 128 * 8 * 8 * width


def test_replicas_of_pipelines_reduce_their_gradients():
    words = ["mode=pipeline", "model.name=cnn", "data.name=synthetic", "batch_size=64", "pipeline.stages=2"]
    found = plan(load_recipe(None, *words), nproc=4)
    assert found["batch"]["shards"] == 2
    largest = max(device["gradients"] for device in found["memory_per_device"])
    assert found["communication"]["all_reduce_bytes_per_device"] == largest

"""What TensorBoard is told to show first, together, and in its table of runs."""

import itertools

import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metadata import (
    parse_experiment_plugin_data,
    parse_session_start_info_plugin_data,
)

from trainer.telemetry import dashboards

LOGGED = ["train/loss", "train/lr", "train/grad_norm", "val/loss", "val/top1", "val/top5", "speed/samples_per_sec"]
LOGGED += [
    "speed/data_wait_pct",
    "speed/samples_per_sec_per_device",
    "speed/val_samples_per_sec",
    "speed/step_ms",
    "speed/part_data_ms",
]
LOGGED += ["speed/part_bubble_ms", "speed/part_compute_ms", "speed/part_optimizer_ms"]
LOGGED += ["memory/peak_gib/cpu", "pipeline/bubble_pct", "pipeline/bubble_predicted_pct"]
LOGGED += ["pipeline/stage0_busy_pct", "pipeline/stage1_busy_pct", "summary/best_top1"]


def groups(tags):
    """As TensorBoard makes and sorts them."""
    return list(dict.fromkeys(tag.split("/")[0] for tag in sorted(tags)))


@pytest.mark.parametrize(
    ("metric", "first"),
    [
        (
            "top1",
            [
                "1_train_loss",
                "2_val_loss",
                "3_val_top1",
                "4_samples_per_sec",
                "5_val_samples_per_sec",
                "6_data_wait_pct",
            ],
        ),
        (
            "loss",
            ["1_train_loss", "2_val_loss", "4_samples_per_sec", "5_val_samples_per_sec", "6_data_wait_pct"],
        ),
    ],
)
def test_learning_and_speed_come_first_and_memory_last(metric, first):
    found = dashboards.arranged({tag: float(n) for n, tag in enumerate(LOGGED)}, metric)
    assert groups(found) == ["overview", "speed", "train", "val", "z_memory", "z_pipeline", "z_summary"]
    assert [tag.removeprefix("overview/") for tag in sorted(found) if tag.startswith("overview/")] == first
    assert found["overview/1_train_loss"] == found["train/loss"] == 0.0
    assert {tag for tag in LOGGED if tag.startswith(("train/", "val/", "speed/"))} <= set(found)


def test_what_is_not_logged_is_not_made_up():
    assert dashboards.arranged({"train/lr": 0.1}, "top1") == {"train/lr": 0.1}
    assert dashboards.arranged({}, "top1") == {}


def layout(**settings):
    settings = {"communication": False, "pipeline": False} | settings
    [value] = dashboards.layout(("loss", "top1"), {"top1": "top-1"}, **settings).value
    return Layout.FromString(value.tensor.string_val[0])


def test_charts_of_all_modes_are_the_same_so_that_runs_share_them():
    """TensorBoard takes two charts for one only where they are equal."""
    kinds = itertools.product((False, True), repeat=3)
    every = [layout(communication=known, pipeline=pipeline, gpu=gpu) for known, pipeline, gpu in kinds]
    for rows in zip(*(one.category for one in every), strict=False):
        known = {chart.title: chart for chart in rows[-1].chart}
        assert all(chart == known[chart.title] for row in rows for chart in row.chart)


def charts(**settings):
    """{question: {title: tags}} of the layout."""
    found = layout(**settings)
    return {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in found.category
    }


ROWS = ["does it learn", "how fast", "where a step's time goes", "how full"]


def test_the_charts_answer_questions():
    found = charts(pipeline=True, communication=True)
    assert list(charts()) == ROWS and list(found)[:-1] == ROWS and "stages" in list(found)[-1]
    assert list(found["does it learn"]) == [
        "loss: training, and validation",
        "top-1 of validation",
        "learning rate",
        "gradient norm",
    ]
    parts = [title.split(",")[0] for title in found["where a step's time goes"]]
    assert parts == ["data", "compute", "optimizer", "communication", "bubble"]
    waits = [tags for tags in charts(gpu=True)["where a step's time goes"].values()][3:]
    assert waits == [["speed/launch_bound_pct$"]]
    assert len(charts()["where a step's time goes"]) == 3, "no empty charts of what a mode does not have"


def test_each_bubble_has_its_own_chart():
    """All lines of a run have its colour."""
    row = charts(pipeline=True)["how busy are the stages"]
    shown = [tags for title, tags in row.items() if "bubble" in title]
    names = ("bubble_pct", "bubble_predicted_pct", "bubble_at_most_pct")
    assert shown == [[f"z_pipeline/{name}$"] for name in names]


def test_the_columns_of_the_table_of_runs():
    main = {"mode": "ddp", "model": "cnn", "devices": "2 x cpu", "batch_size": 96, "lr": 0.1, "precision": "fp32"}
    changed = {"optimizer.momentum": 0.8, "compile": True, "augment.crop": "pad"}
    experiment, start = dashboards.columns(main, changed, {"top1": "top-1", "f1": "F1"})
    infos = parse_experiment_plugin_data(experiment.value[0].metadata.plugin_data.content)
    shown = sorted(infos.hparam_infos, key=lambda info: (not info.differs, info.name))  # as TensorBoard does
    assert [info.display_name for info in shown] == [*main, "changed", "augment.crop", "compile", "optimizer.momentum"]
    assert [info.display_name for info in infos.metric_infos] == [
        "best top-1",
        "last top-1",
        "images/s",
        "step, ms",
        "hours",
        "best F1",
        "last F1",
    ]
    assert [info.name.tag for info in infos.metric_infos][:2] == ["z_summary/best_top1", "z_summary/last_top1"]
    told = parse_session_start_info_plugin_data(start.value[0].metadata.plugin_data.content).hparams
    assert {info.name for info in shown} == set(told)
    assert told["4_batch_size"].number_value == 96 and told["compile"].bool_value is True
    assert told["8_changed"].string_value == "optimizer.momentum=0.8 compile=True augment.crop=pad"


@pytest.mark.parametrize(
    ("tag", "again"),
    [("val/top1", True), ("overview/3_val_top1", True), ("z_memory/peak_gib/cpu", True), ("z_summary/best_top1", True),
     ("view/2 worst predictions", True), ("speed/val_samples_per_sec", True), ("memory/peak_gib/cpu", True),
     ("train/loss", False), ("overview/1_train_loss", False), ("speed/samples_per_sec", False),
     ("z_pipeline/bubble_pct", False)],
)  # fmt: skip
def test_which_values_an_epochs_end_logs(tag, again):
    assert bool(dashboards.AT_END.match(tag)) is again

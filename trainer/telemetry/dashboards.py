"""How TensorBoard shows a run: which charts come first, and what lies together.

TensorBoard sorts groups of tags by name. Time Series, its first page, opens the first two, Scalars the first three. So
what everybody looks for is repeated in a group that sorts first, and what few look at moves to groups that sort last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FIRST, LAST = "overview/", "z_"
_MOVED = ("memory/", "pipeline/")  # to the end
# What a run that is continued within an epoch logs anew at its end.
AT_END = re.compile(
    r"(z_)?(memory|summary)/|val/|verdict/|view/|overview/\d_val_|speed/(val_|goodput|part_communication)"
)
ANEW = re.compile(r"run/|_hparams_/|custom_scalars__config__")  # what every part of a run tells for itself
PICTURES = ("batch as the model sees it", "confusion matrix", "timeline")


def arranged(values: Mapping[str, float], metric: str) -> dict[str, float]:
    """Values by tag, under the tags that TensorBoard is given: some moved to the end, the most wanted also in front."""
    front = _front(metric)
    moved = {LAST + tag if tag.startswith(_MOVED) else tag: value for tag, value in values.items()}
    return moved | {FIRST + front[tag]: value for tag, value in values.items() if tag in front}


def _front(metric: str) -> dict[str, str]:
    """Numbered alike for all tasks, so that runs of several tasks share the charts that they have in common."""
    speed = ("speed/samples_per_sec", "speed/val_samples_per_sec", "speed/data_wait_pct")
    wanted = ("train/loss", "val/loss", f"val/{metric}", *speed)
    short = [f"{n}_{tag.removeprefix('speed/').replace('/', '_')}" for n, tag in enumerate(wanted, 1)]
    return dict(reversed([*zip(wanted, short, strict=True)]))  # where the loss is the metric, too, its number is 2


def layout(metrics: Sequence[str], pipeline: bool, gpu: bool) -> Any:
    """Custom Scalars: rows of charts that answer a question each.

    TensorBoard puts the charts of all runs together, and takes two for one only where they are quite the same. What
    not every run has, as a `pipeline`, comes last in its row.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata

    waiting = ("GPU waits for Python's launches, % of a step at most", "speed/launch_bound_pct")
    rows: dict[str, list[tuple[str, ...]]] = {  # charts by question, each a title and its tags
        "does it learn": [
            ("loss: training, and validation", "train/loss", "val/loss"),
            *((f"{name} of validation", f"val/{name}") for name in metrics if name != "loss"),
        ],
        "how fast": [
            ("images/s, all devices together", "speed/samples_per_sec"),
            ("goodput, %: share of all time in useful steps", "speed/goodput_pct"),
        ],
        "where a step's time goes": [
            *((f"{part}, ms of a step", f"speed/part_{part}_ms") for part in ("data", "compute", "optimizer")),
            *[("bubble, ms of a step", "speed/part_bubble_ms")] * pipeline,
            *[waiting] * gpu,
        ],
        "how full": [("peak memory, GiB", "z_memory/peak_gib/.*")],
    }
    if pipeline:
        rows["how busy are the stages"] = [("stages at work, %", r"z_pipeline/stage\d+_busy_pct")]
    page = Layout()
    for question, charts in rows.items():
        lines = [(title, MultilineChartContent(tag=[f"{tag}$" for tag in tags])) for title, *tags in charts]
        page.category.append(Category(title=question, chart=[Chart(title=t, multiline=tags) for t, tags in lines]))
    tensor = TensorProto(dtype="DT_STRING", string_val=[page.SerializeToString()])
    tensor.tensor_shape.SetInParent()  # a scalar
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, metadata=create_summary_metadata(), tensor=tensor)])


def image(name: str, encoded: bytes, size: tuple[int, int]) -> Any:
    """A picture (PNG or JPEG) of (width, height), one of PICTURES; TensorBoard sorts them by their tags."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = size
    picture = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
    return Summary(value=[Summary.Value(tag=f"view/{PICTURES.index(name) + 1} {name}", image=picture)])

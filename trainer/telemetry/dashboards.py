"""How TensorBoard shows a run: which charts come first.

TensorBoard sorts groups of tags by name. Time Series, its first page, opens the first two, Scalars the first three. So
what everybody looks for is repeated in a group that sorts first, and what few look at moves to groups that sort last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIRST, LAST = "overview/", "z_"
_MOVED = ("memory/", "pipeline/")  # to the end
# What a run that is continued within an epoch logs anew at its end.
AT_END = re.compile(
    r"(z_)?(memory|summary)/|val/|verdict/|view/|overview/\d_val_|speed/(val_|goodput|part_communication)"
)
PICTURES = ("batch as the model sees it", "confusion matrix")


def arranged(values: Mapping[str, float], metric: str) -> dict[str, float]:
    """Values by tag, under the tags that TensorBoard is given: some moved to the end, the most wanted also in front."""
    speed = ("speed/samples_per_sec", "speed/val_samples_per_sec", "speed/data_wait_pct")
    wanted = ("train/loss", "val/loss", f"val/{metric}", *speed)
    # Numbered alike for all tasks, so that runs of several tasks share the charts that they have in common.
    short = [f"{n}_{tag.removeprefix('speed/').replace('/', '_')}" for n, tag in enumerate(wanted, 1)]
    front = dict(reversed([*zip(wanted, short, strict=True)]))  # where the loss is the metric, too, its number is 2
    moved = {LAST + tag if tag.startswith(_MOVED) else tag: value for tag, value in values.items()}
    return moved | {FIRST + front[tag]: value for tag, value in values.items() if tag in front}


def image(name: str, encoded: bytes, size: tuple[int, int]) -> Any:
    """A picture (PNG or JPEG) of (width, height), one of PICTURES; TensorBoard sorts them by their tags."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = size
    picture = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
    return Summary(value=[Summary.Value(tag=f"view/{PICTURES.index(name) + 1} {name}", image=picture)])

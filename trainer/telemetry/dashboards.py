"""How TensorBoard shows a run: which charts come first, what lies together, the columns of its table of runs.

TensorBoard sorts groups of tags by name. Time Series, its first page, opens the first two, Scalars the first three. So
what everybody looks for is repeated in a group that sorts first, and what few look at moves to groups that sort last.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

FIRST, LAST = "overview/", "z_"
_MOVED = ("memory/", "pipeline/", "summary/")  # to the end
# What a run that is continued within an epoch logs anew at its end.
AT_END = re.compile(
    r"(z_)?(memory|summary)/|val/|verdict/|view/|overview/\d_val_|speed/(val_|goodput|part_communication)"
)
ANEW = re.compile(r"run/|_hparams_/|custom_scalars__config__")  # what every part of a run tells for itself
PICTURES = ("batch as the model sees it", "worst predictions", "confusion matrix", "accuracy a class", "timeline")
SUMMARY = {"samples_per_sec": "images/s", "step_ms": "step, ms", "hours": "hours"}  # results by tag below summary/


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


def layout(
    metrics: Sequence[str], titles: Mapping[str, str], communication: bool, pipeline: bool, gpu: bool = False
) -> Any:
    """Custom Scalars: rows of charts that answer a question each.

    TensorBoard puts the charts of all runs together, and takes two for one only where they are quite the same. What
    not every run has comes last in its row: `communication`, which only a run's end tells, and what a `pipeline` has.
    There are lines only: areas of several runs would hide each other, and need both of their edges in each run.
    """
    others = [name for name in metrics if name != "loss"]
    parts = ["data", "compute", "optimizer", *["communication"] * communication, *["bubble"] * pipeline]
    when = {"communication": ", known only at the end: until then counted as compute"}
    learning = [
        _lines("loss: training, and validation", "train/loss", "val/loss"),
        *(_lines(f"{titles.get(name, name)} of validation", f"val/{name}") for name in others),
        _lines("learning rate", "train/lr"),
        _lines("gradient norm", "train/grad_norm"),
    ]
    speed = [
        _lines("images/s, all devices together", "speed/samples_per_sec"),
        _lines("images/s, one device", "speed/samples_per_sec_per_device"),
        _lines("images/s, validation", "speed/val_samples_per_sec"),
        _lines("step, ms", "speed/step_ms"),
        _lines("goodput, %: share of all time in useful steps", "speed/goodput_pct"),
    ]
    rows = {
        "does it learn": learning,
        "how fast": speed,
        "where a step's time goes": [
            *(_lines(f"{part}, ms of a step{when.get(part, '')}", f"speed/part_{part}_ms") for part in parts),
            *[_lines("GPU waits for Python's launches, % of a step at most", "speed/launch_bound_pct")] * gpu,
        ],
        "how full": [_lines("peak memory, GiB", "z_memory/peak_gib/.*")],
    }
    if pipeline:
        rows["how busy are the stages"] = [
            _lines("stages at work, %", r"z_pipeline/stage\d+_busy_pct"),
            _lines("bubble measured, %", "z_pipeline/bubble_pct"),
            _lines("bubble predicted, %", "z_pipeline/bubble_predicted_pct"),
            _lines("bubble at most, %, if GPUs waited for launches", "z_pipeline/bubble_at_most_pct"),
        ]
    return _custom_scalars(rows)


def _lines(title: str, *tags: str) -> Any:
    """A chart of lines; tags are regular expressions, which would not need to match to the end."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    content = layout_pb2.MultilineChartContent(tag=[f"{tag}$" for tag in tags])
    return layout_pb2.Chart(title=title, multiline=content)


def _custom_scalars(rows: Mapping[str, Sequence[Any]]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Layout
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata

    page = Layout(category=[Category(title=question, chart=charts) for question, charts in rows.items()])
    tensor = TensorProto(dtype="DT_STRING", string_val=[page.SerializeToString()])
    tensor.tensor_shape.SetInParent()  # a scalar
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, metadata=create_summary_metadata(), tensor=tensor)])


def columns(main: Mapping[str, Any], changed: Mapping[str, Any], metrics: Mapping[str, str]) -> list[Any]:
    """HParams: a line a run. `main` comes first and in this order, then `changed`, then results.

    TensorBoard takes the columns of all runs from one of them, so what is peculiar to a run is also told in a column
    that each has, in words. It sorts columns by name; what is shown is another name.

    Args:
        metrics: what people call the metric of this run's task, and those of others. Each has columns of its own: an F1
            under the accuracy of other runs would be misread.
    """
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    words = " ".join(f"{key}={value}" for key, value in changed.items())
    shown = {f"{n}_{key}": (key, value) for n, (key, value) in enumerate(main.items(), 1)}
    shown |= {"8_changed": ("changed", words)} | {key: (key, value) for key, value in changed.items()}
    infos = [
        api_pb2.HParamInfo(name=name, display_name=key, type=_kind(value), differs=key in main)
        for name, (key, value) in shown.items()
    ]
    scores = [
        {f"{which}_{metric}": f"{which} {title}" for which in ("best", "last")} for metric, title in metrics.items()
    ]
    results = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=f"z_summary/{tag}"), display_name=title)
        for part in (*scores[:1], SUMMARY, *scores[1:])
        for tag, title in part.items()
    ]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=results, time_created_secs=time.time())
    start = SessionStartInfo(start_time_secs=time.time())  # without a name, its line has the run's
    for name, (_, value) in shown.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = str(value)
    return [
        _hparams("experiment", HParamsPluginData(experiment=experiment)),
        _hparams("session_start_info", HParamsPluginData(session_start_info=start)),
    ]


def ended(well: bool = True) -> Any:
    """HParams: the run is over."""
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = api_pb2.STATUS_SUCCESS if well else api_pb2.STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _hparams("session_end_info", HParamsPluginData(session_end_info=end))


def _hparams(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR, create_summary_metadata

    metadata = create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=f"_hparams_/{tag}", metadata=metadata, tensor=NULL_TENSOR)])


def image(name: str, encoded: bytes, size: tuple[int, int]) -> Any:
    """A picture (PNG or JPEG) of (width, height), one of PICTURES; TensorBoard sorts them by their tags."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = size
    picture = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
    return Summary(value=[Summary.Value(tag=f"view/{PICTURES.index(name) + 1} {name}", image=picture)])


def _kind(value: Any) -> int:
    from tensorboard.plugins.hparams import api_pb2

    if isinstance(value, bool):
        return int(api_pb2.DATA_TYPE_BOOL)
    return int(api_pb2.DATA_TYPE_FLOAT64 if isinstance(value, int | float) else api_pb2.DATA_TYPE_STRING)

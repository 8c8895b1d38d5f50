"""TensorBoard event files: writing, reading and trimming.

torch's own writer hands values to a thread, which reopens the file by its name for every block. If
the disk is full or the directory was removed, that thread prints a traceback later. Here, the call
that logs raises an error.
"""

from __future__ import annotations

import io
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.processes.terminal import Say
from trainer.recipe.text import format_value
from trainer.saving.files import (
    AppendFile,
    describe_error,
    open_regular,
    replace_file,
    set_aside,
    temporary_path,
)

# `trainer.saving.checkpoint` imports torch. The command `runs` uses this module without torch.
if TYPE_CHECKING:
    from PIL.Image import Image

    from trainer.saving.checkpoint import Position

# Lists (steps, seconds, values) of one tag. The seconds count from the first event of the run.
Curve = tuple[list[float], list[float], list[float]]
# Number of seconds after which logged values are flushed, so that TensorBoard can read them.
FLUSH_SECONDS = 10.0
# Maximum number of colors of a picture that is stored as PNG. A picture with more contains photos.
MAX_PNG_COLOURS = 4096
# Field of the first event of every file, which states the format of the file.
VERSION = {"file_version": "brain.Event:2"}
# Head of a record: the length of its data and the checksum of the length. The data and their
# checksum follow.
_HEAD = struct.Struct("<QI")
# Version 0.1 repeated important values under this prefix, and put `_OLD_LAST` before `_OLD_MOVED`.
_OLD_FIRST = "overview/"
_OLD_LAST = "z_"
_OLD_MOVED = ("memory/", "pipeline/")
# Tags that a run logs at the end of an epoch. A run that is resumed before the epoch's evaluation
# logs them again.
AT_END = re.compile(
    r"(z_)?(memory|summary)/|val/|verdict/|view/|overview/\d_val_|speed/(val_|goodput|part_communication)"
)
# Prefixes of the tags that a run logs when it is complete. A resumed run logs them again.
AT_COMPLETION = ("_hparams_/", "final/")


def has_old_tags(folder: Path) -> bool:
    """Return whether version 0.1 has logged the run in `folder`, under tags of its own."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            tags = [value.tag for value in event.summary.value]
            if "train/loss" in tags:
                return f"{_OLD_FIRST}1_train_loss" in tags
    return False


def rename_as_before(values: Mapping[str, float], metric: str) -> dict[str, float]:
    """Return values by the tags of version 0.1, so that the curves of its runs are continued.

    Args:
        values: Values by tag.
        metric: Name of the main metric.
    """
    important = (
        "train/loss",
        "val/loss",
        f"val/{metric}",
        "speed/samples_per_sec",
        "speed/val_samples_per_sec",
        "speed/data_wait_pct",
    )
    front: dict[str, str] = {}
    # The numbers are the same for all tasks, so that runs of several tasks share charts.
    for n, tag in enumerate(important, 1):
        name = tag.removeprefix("speed/").replace("/", "_")
        # If the main metric is the loss, its tag occurs twice: keep the first number.
        front.setdefault(tag, f"{_OLD_FIRST}{n}_{name}")
    moved = {}
    repeated = {}
    for tag, value in values.items():
        if tag in front:
            repeated[front[tag]] = value
        if tag.startswith(_OLD_MOVED):
            tag = _OLD_LAST + tag
        moved[tag] = value
    return moved | repeated


def image_summary(name: str, picture: Image) -> Any:
    """Return the summary of a picture.

    Args:
        name: Tag of the picture, without its group.
        picture: The picture. It is stored as PNG up to MAX_PNG_COLOURS colors, otherwise as JPEG.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = picture.size
    buffer = io.BytesIO()
    kind = "PNG" if picture.getcolors(MAX_PNG_COLOURS) else "JPEG"
    # Higher levels of compression take several times as long, for a PNG that is little smaller.
    picture.save(buffer, kind, quality=90, compress_level=1)
    image = Summary.Image(
        width=width, height=height, colorspace=3, encoded_image_string=buffer.getvalue()
    )
    return Summary(value=[Summary.Value(tag=f"view/{name}", image=image)])


def hparams_summary(
    values: Mapping[str, Any],
    figures: Mapping[str, float],
    seconds: float,
) -> Any:
    """Return the summary of a completed run for TensorBoard's HPARAMS tab.

    The optional summary of an experiment is left out: TensorBoard would read it from a single run,
    and show only the keys in it. Without it, the tab shows all keys of all runs.

    Args:
        values: Value of each key.
        figures: Final figures by name.
        seconds: Duration of the run.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2

    now = time.time()
    shown = {}
    for key, value in values.items():
        is_simple = isinstance(value, bool | int | float | str)
        shown[key] = value if is_simple else format_value(value)
    # The default ID is a hash of the values, and runs with the same ID share a row. An empty ID
    # gives each run a row of its own.
    start = summary_v2.hparams_pb(shown, trial_id="", start_time_secs=now - seconds)
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=now)
    content = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    entry = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(content),
        tensor=metadata.NULL_TENSOR,
    )
    summary = Summary(value=[*start.value, entry])
    for name, figure in figures.items():
        summary.value.add(tag=f"final/{name}", simple_value=figure)
    return summary


class Events(AppendFile):
    """Writer of one event file."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names, so the name of a
        # new file must sort last.
        writer = f"{socket.gethostname()}.{os.getpid()}{suffix}"
        name = f"events.out.tfevents.{_choose_next_time(folder):.6f}.{writer}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._flushed = time.monotonic()
        self._records.write(_encode_event(**VERSION))

    def add(self, summary: Any, step: int) -> None:
        """Write a protobuf `Summary`, such as torch.utils.tensorboard.summary.scalar returns."""
        self._records.write(_encode_event(step=step, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write all values as one event, because one event per value would take far longer."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.add(Summary(value=entries), step)

    def begin(self, step: int) -> None:
        """Mark the start or resumption of a run, so that TensorBoard drops values from `step` on.

        TensorBoard ignores the first mark that it reads, so a new run must write one, too.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._records.write(
            _encode_event(step=step, session_log=SessionLog(status=SessionLog.START))
        )


def _choose_next_time(folder: Path) -> float:
    """Return the time in the name of the next event file of a directory.

    This is the current time, or a time after the newest file if the clock has been set back.
    """
    latest = time.time()
    for path in folder.glob("events.out.tfevents.*"):
        match = re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name)
        if match:
            latest = max(latest, float(match[1]) + 1)
    return latest


def _encode_event(**fields: Any) -> bytes:
    """Return an event with the current time, as bytes."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(wall_time=time.time(), **fields)
    return event.SerializeToString()  # type: ignore[no-any-return]


def read_events(
    path: Path,
    warn: Say = lambda line: None,
) -> Iterator[Any]:
    """Yield the events of a file up to its end or to the first damaged record.

    An incomplete last record is ignored: its writer was killed, or is still writing.

    Args:
        path: Event file.
        warn: Function that is called with one line if the file is damaged.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import masked_crc32c

    count = 0
    try:
        with open_regular(path) as file:
            left = os.fstat(file.fileno()).st_size
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, check = _HEAD.unpack(head)
                if masked_crc32c(head[:8]) != check:
                    raise ValueError("a length's checksum differs")
                left -= _HEAD.size + length + 4
                if left < 0:
                    return
                data = file.read(length)
                (check,) = struct.unpack("<I", file.read(4))
                if masked_crc32c(data) != check:
                    raise ValueError("a record's checksum differs")
                yield Event.FromString(data)
                count += 1
    # Errors of protobuf and of files have no common base class, so catch any exception.
    except Exception as error:
        warn(f"{path} is left out after {count} events: {describe_error(error)}")


def read_curves(folder: Path) -> dict[str, Curve]:
    """Return the values in the TensorBoard files of a run folder, by tag."""
    curves: dict[str, Curve] = {}
    begun = None
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            begun = begun or event.wall_time
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    steps, seconds, values = curves.setdefault(value.tag, ([], [], []))
                    steps.append(float(event.step))
                    seconds.append(event.wall_time - begun)
                    values.append(value.simple_value)
    return curves


def trim_events(
    folder: Path,
    position: Position,
    is_evaluated: bool,
    warn: Say = lambda line: None,
) -> None:
    """Merge the event files of a resumed run into one that ends at `position`.

    The result has one value for each tag and step. If the run is resumed before the evaluation at
    the end of an epoch, the values of the end of the epoch are dropped, because the run will log
    them again. If this process is killed at any moment, the files still contain all other values,
    and the next call removes duplicates.

    Args:
        folder: Directory of the event files.
        position: Position from which the run is resumed.
        is_evaluated: Whether the evaluation at `position`, if any, will not be done again.
        warn: Function that is called with one line for each damaged file.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    old = sorted(folder.glob("events.out.tfevents.*"))
    if not old:
        return
    draft = temporary_path(folder / "events")
    try:
        with draft.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(_encode_event(**VERSION))
            for event in _read_events(position, is_evaluated, old, warn):
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        # Replace the newest file instead of removing it: a TensorBoard that is open reads this
        # file, and would read no later file if it disappeared.
        replace_file(draft, old[-1])
    finally:
        draft.unlink(missing_ok=True)
    for path in old[:-1]:
        set_aside(path)
        path.unlink(missing_ok=True)


def _read_events(
    position: Position,
    is_evaluated: bool,
    paths: Sequence[Path],
    warn: Say,
) -> Iterator[Any]:
    """Yield the events that a run resumed at `position` keeps, with each (tag, step) once."""
    seen = set()
    has_ended = False
    # A run that starts again from step 0 keeps nothing.
    if position.step == 0:
        return
    for path in paths:
        for event in read_events(path, warn):
            fresh = []
            for value in event.summary.value:
                key = (value.tag, event.step)
                if value.tag.startswith(AT_COMPLETION):
                    continue
                if event.step == position.step and not is_evaluated:
                    is_at_end = AT_END.match(value.tag) is not None
                    has_ended = has_ended or is_at_end
                    # Callbacks run after the evaluation, and will log these values again.
                    if is_at_end or (has_ended and value.tag.startswith("logged/")):
                        continue
                if event.step <= position.step and key not in seen:
                    seen.add(key)
                    fresh.append(value)
            if fresh:
                del event.summary.value[:]
                event.summary.value.extend(fresh)
                yield event

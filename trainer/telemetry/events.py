"""TensorBoard: which charts of a run it shows first, and its event files, written by the thread that has the values and
read with limits.

It sorts groups of tags by name. Time Series, its first page, opens the first two, Scalars the first three. So what
everybody looks for is repeated in a group that sorts first, and what few look at moves to groups that sort last.

torch's own writer hands values to a thread, which reopens the file by its name for every block: a full disk or a folder
that was removed then ends in that thread's traceback, late. Here it is an error of the line that logs.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.saving.files import AppendFile, draft_of, opened, put, set_aside, why

if TYPE_CHECKING:  # it imports torch, and `runs` reads events without
    from trainer.saving.checkpoint import Position

Curve = tuple[list[float], list[float], list[float]]  # steps, seconds since training began, values
FLUSH_SECONDS = 10.0  # readers see what is written within about this long
VERSION = {"file_version": "brain.Event:2"}  # a file of events begins with it
_HEAD = struct.Struct("<QI")  # of a record: its length, and a checksum of that; after it a checksum of the data
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


class Events(AppendFile):
    """One event file of a folder."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # The name is TensorBoard's, which reads files in its order.
        name = f"events.out.tfevents.{_next_time(folder):.6f}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self._file = (folder / name).open("xb")
        self._records, self._flushed = RecordWriter(self._file), time.monotonic()
        self._records.write(_encoded(**VERSION))

    def add(self, summary: Any, step: int) -> None:
        """A summary, as `torch.utils.tensorboard.summary` makes them."""
        self._records.write(_encoded(step=step, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One event for all of them: an event each would cost several times as much."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)

    def begin(self, step: int) -> None:
        """A part of a run begins, whose first step is this one: a TensorBoard that has read values of it forgets them.

        It does so from the second beginning on that it sees, so that the first part has to tell its own.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._records.write(_encoded(step=step, session_log=SessionLog(status=SessionLog.START)))


def _next_time(folder: Path) -> float:
    """The time for the name of a folder's next file: now, or after its newest where a clock was set back since."""
    times = [re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name) for path in folder.glob("events.out.tfevents.*")]
    return max(time.time(), *(float(match[1]) + 1 for match in times if match), 0.0)


def _encoded(**fields: Any) -> bytes:
    """An event of now."""
    from tensorboard.compat.proto.event_pb2 import Event

    event: bytes = Event(wall_time=time.time(), **fields).SerializeToString()
    return event


def read_events(path: Path, warn: Callable[[str], None] = lambda line: None) -> Iterator[Any]:
    """The events of a file up to its end, or to where it is damaged, of which `warn` gets a line.

    A last record that is cut short is no damage: its writer was killed, or is still at it.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import masked_crc32c

    count = 0
    try:
        with opened(path) as file:
            left = os.fstat(file.fileno()).st_size
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, check = _HEAD.unpack(head)
                if masked_crc32c(head[:8]) != check:
                    raise ValueError("a length's checksum differs")
                left -= _HEAD.size + length + 4
                if left < 0:
                    return
                data, (check,) = file.read(length), struct.unpack("<I", file.read(4))
                if masked_crc32c(data) != check:
                    raise ValueError("a record's checksum differs")
                yield Event.FromString(data)
                count += 1
    except Exception as error:  # protobuf has kinds of its own
        warn(f"{path} is left out after {count} events: {why(error)}")


def curves_of(folder: Path) -> dict[str, Curve]:
    """A run's TensorBoard values by tag."""
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


def trim_events(folder: Path, position: Position, warn: Callable[[str], None] = lambda line: None) -> None:
    """Rewrite a continued run's files into one that ends at `position`: one value a (tag, step).

    In the middle of an epoch, or before its evaluation, what that will log at this step is still to come. Wherever this
    is killed, the files that are there hold all else, once a (tag, step) after the next time.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    old = sorted(folder.glob("events.out.tfevents.*"))
    if not old:
        return
    draft = draft_of(folder / "events")
    try:
        with draft.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(_encoded(**VERSION))
            for event in _up_to(position, old, warn):
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        put(draft, old[-1])  # the one that an open TensorBoard is at: where that is removed, it reads no later ones
    finally:
        draft.unlink(missing_ok=True)
    for path in old[:-1]:
        set_aside(path)
        path.unlink(missing_ok=True)


def _up_to(position: Position, paths: Sequence[Path], warn: Callable[[str], None]) -> Iterator[Any]:
    """The summaries that a run continued at `position` keeps, each value of a (tag, step) once."""
    seen: set[tuple[str, int]] = set()

    def stays(tag: str, step: int) -> bool:
        if step == position.step:
            return position.step_in_epoch == 0 or not AT_END.match(tag)
        return step < position.step

    for path in paths if position.step else ():
        for event in read_events(path, warn):
            fresh = []
            for value in event.summary.value:
                place = (value.tag, event.step)
                if place not in seen and stays(*place):
                    seen.add(place)
                    fresh.append(value)
            if fresh:
                del event.summary.value[:]
                event.summary.value.extend(fresh)
                yield event

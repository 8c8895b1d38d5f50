"""TensorBoard's files of a run -> curves."""

from __future__ import annotations

from pathlib import Path

from trainer.telemetry.events import read_events

Curve = tuple[list[float], list[float], list[float]]  # steps, seconds since training began, values


def curves_of(folder: Path) -> dict[str, Curve]:
    """A run's TensorBoard values by tag."""
    found: dict[str, Curve] = {}
    begun = None
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            begun = begun or event.wall_time
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    steps, seconds, values = found.setdefault(value.tag, ([], [], []))
                    steps.append(float(event.step))
                    seconds.append(event.wall_time - begun)
                    values.append(value.simple_value)
    return found

"""What TensorBoard would show of a folder."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader


def written(folder):
    """(tag, step) of every value, sorted."""
    events = []
    for path in filter(Path.is_file, folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(value.tag, event.step) for value in event.summary.value]
    return sorted(events)


def scalars(folder):
    """(step, value) of every scalar, by tag."""
    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

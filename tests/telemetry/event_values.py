"""What TensorBoard would show of a folder."""

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader


def written(folder):
    """(tag, step) of every value, sorted."""
    events = []
    for path in filter(Path.is_file, folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            events += [(value.tag, event.step) for value in event.summary.value]
    return sorted(events)

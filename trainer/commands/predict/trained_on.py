"""Which images a run was trained on: what it says of them tells little of new ones."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.data.folders.layout import layout_of
from trainer.data.folders.scanning import LeftOut
from trainer.data.folders.splits import part_of
from trainer.errors import SetupError
from trainer.recipe import Recipe
from trainer.saving.files import portable


class TrainedOn:
    """The files that a run was trained on, as far as its folder and theirs tell."""

    def __init__(self, root: Path, names: frozenset[str] | None) -> None:
        """`names` below the root, as split.csv has them; None: all that lies there."""
        self._roots = tuple({os.path.join(path(root), "") for path in (os.path.abspath, os.path.realpath)})
        self._names = names
        self._real: dict[str, str] = {}  # of the folders that were met

    def __contains__(self, path: str) -> bool:
        folder, name = os.path.split(os.path.abspath(path))
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        for place in (os.path.join(folder, name), os.path.join(self._real[folder], name)):
            for root in self._roots:
                if place.startswith(root) and (self._names is None or portable(place[len(root) :]) in self._names):
                    return True
        return False


def trained_on(path: Path, recipe: Recipe) -> TrainedOn | None:
    """Those of the run that has weights at `path`, with its own recipe; None where nothing tells.

    A split that the run made is in its folder; else folders with a training and a held-out part tell.
    """
    data = recipe.data
    if data.name != "imagefolder" or data.root is None:
        return None
    root = Path(data.root).expanduser()
    try:
        names = part_of(path, "train")
        if data.labels is not None:
            return None if names is None else TrainedOn(root, names)
        layout = layout_of(root, LeftOut())
    except SetupError:  # the photos are not there any more, or split.csv cannot be read
        return None
    return TrainedOn(layout.train, names) if names is not None or layout.held_out is not None else None

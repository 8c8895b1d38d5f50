"""What classes are called, and in which order, wherever images have theirs: in folders, tables, shards, programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from trainer.saving.files import portable
from trainer.tasks.classification import class_name


class ClassNames(NamedTuple):
    """Classes as they are called."""

    names: list[str]
    places: dict[str, int]  # in `names`, of each text that was given
    notes: dict[str, str]  # for a run's banner


def class_names(texts: Iterable[str], others: Iterable[str] = ()) -> ClassNames:
    """The classes that `texts` name, sorted; `others` have places where they name one of these too."""
    forms = {text: class_name(text) for text in texts}
    order = {form: place for place, form in enumerate(sorted({*forms.values()}))}
    forms |= {text: class_name(text) for text in others}
    places = {text: order[form] for text, form in forms.items() if form in order}
    twice = [portable(form) for form, count in Counter(forms.values()).items() if count > 1]
    shown = ", ".join(twice[:4]) + ", ..." * (len(twice) > 4)
    notes = {"names": f"{shown}: written in two Unicode forms, each one class"} if twice else {}
    return ClassNames([*map(portable, order)], places, notes)


def shared_depth(paths: Collection[tuple[str, ...]]) -> int:
    """How many folders all paths begin with alike."""
    first, last = min(paths, default=()), max(paths, default=())
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))

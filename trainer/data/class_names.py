"""What classes are called, and in which order, wherever images have theirs: in folders, tables, shards, programs."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from trainer.saving.files import class_name, portable


class ClassNames(NamedTuple):
    """Classes that are known by their names alone."""

    names: list[str]  # in alphabetical order
    places: dict[str, int]  # of each text that names one of them
    notes: dict[str, str]  # for a run's banner


def class_names(texts: Iterable[str], others: Iterable[str] = ()) -> ClassNames:
    """The classes that `texts` name, as files have them; `others` have places where they name one of these too."""
    forms = {text: unicodedata.normalize("NFC", text) for text in texts}
    order = {form: place for place, form in enumerate(sorted({*forms.values()}))}
    forms |= {text: unicodedata.normalize("NFC", text) for text in others}
    places = {text: order[form] for text, form in forms.items() if form in order}
    return ClassNames([*map(portable, order)], places, _notes(forms))


def merged(names: Sequence[str]) -> ClassNames:
    """The same for the names of classes 0, 1, ..., in this order; several numbers may have one name, as two have crane
    in ImageNet."""
    forms = {name: class_name(name) for name in names}
    if len(forms) < len(names):
        return ClassNames([forms[name] for name in names], {}, {})
    order = {form: place for place, form in enumerate(dict.fromkeys(forms.values()))}
    return ClassNames([*order], {name: order[form] for name, form in forms.items()}, _notes(forms))


def shared_depth(paths: Collection[tuple[str, ...]]) -> int:
    """How many folders all paths begin with alike."""
    first, last = min(paths, default=()), max(paths, default=())
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _notes(forms: Mapping[str, str]) -> dict[str, str]:
    """A note about names that are written in two ways."""
    twice = [portable(form) for form, count in Counter(forms.values()).items() if count > 1]
    shown = ", ".join(twice[:4]) + ", ..." * (len(twice) > 4)
    return {"names": f"{shown}: written in two Unicode forms, each one class"} if twice else {}

"""What classes are called, and in which order, wherever images have theirs: in folders, tables, shards, programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from trainer.saving.files import portable
from trainer.tasks.classification import class_name

Places = TypeVar("Places", dict[str, int], list[int])


class ClassNames(NamedTuple, Generic[Places]):
    """Classes as they are called."""

    names: list[str]
    places: Places  # in `names`, of each text or number that was given
    notes: dict[str, str]  # for a run's banner


def class_names(texts: Iterable[str], others: Iterable[str] = ()) -> ClassNames[dict[str, int]]:
    """The classes that `texts` name, sorted; `others` have places where they name one of these too."""
    forms = {text: class_name(text) for text in texts}
    order = {form: place for place, form in enumerate(sorted({*forms.values()}))}
    forms |= {text: class_name(text) for text in others}
    places = {text: order[form] for text, form in forms.items() if form in order}
    return ClassNames([*map(portable, order)], places, _notes(forms))


def merged(names: Sequence[str]) -> ClassNames[list[int]]:
    """The same for the names of classes 0, 1, ..., in this order. Several numbers may have one name, written alike, as
    two have crane in ImageNet: they stay apart."""
    forms = {name: portable(class_name(name)) for name in names}
    first = {form: name for name, form in reversed(forms.items())}
    kept, places = list[str](), list[int]()
    for name in names:
        form = forms[name]
        places.append(len(kept) if first[form] == name else kept.index(form))
        if first[form] == name:
            kept.append(form)
    return ClassNames(kept, places, _notes(forms))


def shared_depth(paths: Collection[tuple[str, ...]]) -> int:
    """How many folders all paths begin with alike."""
    first, last = min(paths, default=()), max(paths, default=())
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _notes(forms: Mapping[str, str]) -> dict[str, str]:
    """A note about names that are written in two ways."""
    twice = [portable(form) for form, count in Counter(forms.values()).items() if count > 1]
    shown = ", ".join(twice[:4]) + ", ..." * (len(twice) > 4)
    return {"names": f"{shown}: written in two Unicode forms, each one class"} if twice else {}

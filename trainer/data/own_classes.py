"""The classes of a program's data sets: their names, and one numbering of sets that number theirs differently."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from trainer.data.class_names import merged
from trainer.data.folders.scanning import few
from trainer.data.items import made_of, names_in, pair
from trainer.data.sampling import Array
from trainer.errors import RecipeError
from trainer.tasks.task import Reads


class Numbering(NamedTuple):
    """Class numbers as places among the training set's classes."""

    tables: list[list[int]]  # a place for each number, of each of the sets that a set is made of
    which: Array  # (items,) the one of these that an item comes from

    def place(self, index: int, label: Any) -> int:
        """Raises TypeError, ValueError."""
        number, table = operator.index(label), self.tables[int(self.which[index])]
        if not 0 <= number < len(table):
            raise ValueError(f"its label is {number}, and its data set names {len(table)} classes")
        return table[number]

    def of(self, part: Any) -> Any:
        """A set, or a pair of tensors, with such targets. Raises RecipeError."""
        if not isinstance(part, tuple):
            return Renumbered(part, self)
        try:
            return part[0], torch.tensor([self.place(*each) for each in enumerate(part[1].tolist())])
        except (TypeError, ValueError) as error:
            raise RecipeError(f"a sample's class makes no sense: {error}") from None


class Renumbered:
    """A set of which the classes have other numbers."""

    def __init__(self, items: Any, numbering: Numbering) -> None:
        self.items, self.numbering = items, numbering

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item, label = pair(self.items[index])
        return item, self.numbering.place(index, label)


def _which(part: Any) -> Array:
    """(items,) which of these each item comes from."""
    if isinstance(part, Subset):
        return _which(part.dataset)[np.asarray(part.indices, np.int64)]
    if isinstance(part, ConcatDataset):
        starts = np.cumsum([0, *(len(made_of(each)) for each in part.datasets)])
        return np.concatenate([_which(each) + start for each, start in zip(part.datasets, starts, strict=False)])
    return np.zeros(len(part), np.int64)


def matched(
    parts: Sequence[Any], given: tuple[str, ...], reads: Reads, where: str
) -> tuple[tuple[str, ...], list[Numbering | None]]:
    """The names of the training set's classes, empty where neither it nor `given` tells any; and numberings of both
    sets, where they do not name the same in one order. Raises RecipeError: they cannot be matched."""
    sets = [made_of(part) for part in parts]
    known = [[names_in(one) for one in some] for some in sets]
    known[0] = known[0] if any(known[0]) else [given for _ in sets[0]]
    forms = {names: merged(names) for some in known for names in some if names}
    first = next(filter(None, known[0]), ())
    order: dict[str, int] = {}
    for name in (name for names in known[0] if names for name in forms[names].names):
        order.setdefault(name, len(order))
    numberings: list[Numbering | None] = [None, None]
    own = tuple(forms[first].names if first else ())
    if first and (len(forms) > 1 or len(own) < len(first)):
        why = "several of their classes have one name" * any(len({*each}) < len(each) for each, *_ in forms.values())
        why = why or "one of them names none" * (not all(map(all, known)))
        why = why or "an image has several" * (reads == "classes")
        changed = any(getattr(one, "target_transform", None) for some in sets for one in some)
        if why := why or "a target_transform changes their numbers" * changed:
            others = " and ".join(f"({few(each)})" for each in [*forms][:2])
            raise RecipeError(f"{where}: its data sets name different classes, {others}, and {why}: give all the same")
        if absent := [name for names in known[1] for name in forms[names].names if name not in order]:
            raise RecipeError(f"{where}: no training image has the class '{absent[0]}' of the held-out set")
        tables = {each: [order[form.names[n]] for n in form.places] for each, form in forms.items()}
        for n, some in enumerate(known):
            if any(tables[each] != [*range(len(each))] for each in some):
                numberings[n] = Numbering([tables[each] for each in some], _which(parts[n]))
        own = tuple(order)
    if given and sorted(given) == sorted(own) and given != own:
        raise RecipeError(f"{where}: its data sets number the classes {few(own)}, not {few(given)}: leave those out")
    return given or own, numberings

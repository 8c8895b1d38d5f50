"""worst.csv: the samples whose labels are most likely wrong, first those whose label has the least probability."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trainer.saving.files import csv_text, portable

FILE = "worst.csv"
ROWS = 10_000  # at most


class Doubt(NamedTuple):
    """A sample, its label, the class that is predicted, and the model's probability of both."""

    path: str
    label: str
    predicted: str
    label_probability: float
    predicted_probability: float


def table(rows: Iterable[Doubt]) -> str:
    """The text of the file; `rows` are in their order, and each takes one line."""
    lines = (
        (" ".join(portable(row.path).splitlines()), row.label, row.predicted, *(f"{share:.4g}" for share in row[3:]))
        for row in rows
    )
    return csv_text([Doubt._fields, *lines])

"""worst.csv: the samples whose labels are most likely wrong, first those whose label has the least probability."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import NamedTuple

from trainer.saving.files import portable

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
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(Doubt._fields)
    for row in rows:
        path = " ".join(portable(row.path).splitlines())
        lines.writerow([path, row.label, row.predicted, *(f"{probability:.4g}" for probability in row[3:])])
    return text.getvalue()

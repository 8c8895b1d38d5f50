"""What a command on trials tells: one table for a terminal, as CSV, JSON and Markdown; and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.commands.trials.engine import TrialOutcome
from trainer.devices import cards, host
from trainer.processes import resources
from trainer.processes.terminal import as_typed, say, styled
from trainer.saving.files import csv_text, without_nan, write_atomically
from trainer.telemetry import readable

NOTE = 12  # characters of a note within the table of a terminal
SHOWN = 20  # rows of it, where there is a file with all
BUSY = 0.2  # cores: what others may use before it is worth a word


def write_tables(
    folder: Path, name: str, report: Mapping[str, Any], page: str, rows: Sequence[Sequence[Any]] = ()
) -> None:
    """NAME.json, NAME.md and, of its rows with their head, NAME.csv, each replaced at once."""
    write_atomically(folder / f"{name}.json", json.dumps(without_nan(report), indent=2, allow_nan=False) + "\n")
    if rows:
        write_atomically(folder / f"{name}.csv", csv_text(without_nan(rows)))
    write_atomically(folder / f"{name}.md", page)


def as_text(
    table: Sequence[Sequence[str]], right: Container[int], marked: Mapping[int, str], sentences: Sequence[str],
    shown: int | None = None,
) -> str:  # fmt: skip
    """The table for a terminal, its head first; notes in the last column that are long stand below it.

    Args:
        right: columns to the right.
        marked: a style of rows, numbered from 0 below the head.
        shown: rows at most.
    """
    head, *rows = [list(row) for row in table[: None if shown is None else shown + 1]]
    below = []
    for cells in rows:
        if len(cells[-1]) > NOTE:
            below.append(f"{head[0]} {cells[0]}: {cells[-1]}")
            cells[-1] = cells[-1].partition(":")[0]
    lines = [as_typed(line) for line in readable.table([head, *rows], right)]
    lines = [styled(line, marked[n]) if n in marked else line for n, line in enumerate(lines, -1)]
    if len(rows) < len(table) - 1:
        lines.append(f"and {len(table) - 1 - len(rows)} more in the files")
    return "\n".join([*lines, "", *map(as_typed, (*below, *sentences))])


def as_markdown(
    title: str, command: str, table: Sequence[Sequence[str]], bold: Container[int], sentences: Sequence[str],
    *more: str,
) -> str:  # fmt: skip
    """To paste into an issue: command, table, what it says, and paragraphs."""
    lines = [f"### {title}", "", f"    {command}", "", *readable.markdown_table(table, bold), ""]
    lines += [*(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join([*lines, *(line for text in more for line in (text, ""))])


def versions_line(versions: Mapping[str, str | None]) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"Versions: {listed}."


class TrialsProgress:
    """Lines of trials that end: how many of them did, what came of each, what it took, and the time that is left.

    Those to come take as long as the others did, in the mean.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self.ran, self.begun = total, 0, 0, time.monotonic()

    def tell(self, what: str, outcome: TrialOutcome, news: str) -> None:
        """`news` of a trial that did not fail."""
        self.done += 1
        self.ran += outcome.seconds is not None
        left = (self.total - self.done) * (time.monotonic() - self.begun) / max(1, self.ran)
        took = "" if outcome.seconds is None else f", {outcome.seconds:.0f} s; {tqdm.format_interval(left)} left"
        if outcome.error is not None:
            news = f"exit {outcome.error.code}: {outcome.error}"
        say(f"[{self.done}/{self.total}] {what}: {news}{took}")


def tell_files(folder: Path, name: str, curves: Path, draw: Callable[[], Sequence[Path]]) -> None:
    """Draw, and say which files there are. A picture must not hide what came before it."""
    try:
        pictures = [path.name for path in draw()]
    except Exception as error:
        say(f"  no pictures: {type(error).__name__}: {' '.join(str(error).split())}")
        pictures = []
    say(f"  tables   {', '.join([f'{folder}/{name}.md', '.csv', '.json', *pictures])}")
    say(f"  watch    python -m tensorboard.main --logdir {shlex.quote(str(curves))}")


def this_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and system."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(cards.detect().count)]
    about = {"cpu": host.processor(), "cores": resources.cores(), "memory_bytes": host.total_memory()}
    return {**about, "gpus": gpus, "system": platform.platform()}


def machine_line(machine: Mapping[str, Any]) -> str:
    sizes = [f"{machine['cores']} cores", f"{machine['memory_bytes'] / 2**30:.0f} GiB"]
    return f"Machine: {', '.join([machine['cpu'], *sizes, *machine['gpus'], machine['system']])}."


class Others:
    """How many cores other programs kept busy since this was made."""

    def __init__(self) -> None:
        self.begun, self.busy, self.ours = time.perf_counter(), host.core_seconds()[0], sum(os.times()[:4])

    def cores(self) -> float | None:
        """None where the kernel does not tell, or this process may use only a part of the cores.

        Ours are this process and the ended ones that it started.
        """
        now = host.core_seconds()[0]
        if not now or not self.busy or resources.cores() != os.cpu_count():
            return None
        return max(0.0, (now - self.busy - sum(os.times()[:4]) + self.ours) / (time.perf_counter() - self.begun))


def busy_line(cores: float | None) -> list[str]:
    """A warning, where one is due: of so many cores that other programs kept busy."""
    line = f"other programs kept {cores or 0.0:.1f} of {os.cpu_count()} cores busy meanwhile: try again without them"
    return [line] * ((cores or 0.0) >= BUSY)

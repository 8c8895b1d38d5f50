"""Output of the commands that run trials: tables, files, progress lines, and the machine."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.commands.trials.engine import TrialOutcome
from trainer.devices import cards, host
from trainer.errors import describe
from trainer.processes import resources
from trainer.processes.terminal import add_style, localize_commands, say
from trainer.saving.files import Json, format_csv, without_nan, write_atomically, write_json
from trainer.telemetry import readable

# Maximum number of characters of a note in a terminal's table. A longer note is printed below the
# table, and only its text before the first colon stays in the table.
NOTE = 12
# Maximum number of rows of a table in the terminal, if a file contains the whole table. The number
# of omitted rows is printed.
SHOWN = 20
# A measurement counts as unreliable if other processes use at least BUSY cores and at least the
# fraction BUSY_FRACTION of this machine's cores. The services of an idle machine use less. A single
# busy core delays the threads on all others, because they wait for each other.
BUSY = 0.2
BUSY_FRACTION = 0.01


def write_tables(
    folder: Path, name: str, report: Json, page: str, rows: Sequence[Sequence[Any]] = ()
) -> None:
    """Write NAME.json, NAME.md and, if there are `rows`, NAME.csv. Each is replaced atomically."""
    write_json(folder / f"{name}.json", report)
    if rows:
        write_atomically(folder / f"{name}.csv", format_csv(without_nan(rows)))
    write_atomically(folder / f"{name}.md", page)


def as_text(
    table: Sequence[Sequence[str]],
    right: Container[int],
    marked: Mapping[int, str],
    sentences: Sequence[str],
    shown: int = sys.maxsize,
) -> str:
    """Return the table for a terminal. Long notes of the last column are moved below the table.

    Args:
        table: the header row, then all other rows.
        right: indices of the right-aligned columns.
        marked: style of a row by its index; the first row below the header is 0.
        sentences: lines below the table.
        shown: maximum number of rows below the header; the number of omitted rows is printed.
    """
    head, *rows = [list(row) for row in table[: shown + 1]]
    long_notes = []
    for cells in rows:
        if len(cells[-1]) > NOTE:
            long_notes.append(f"{head[0]} {cells[0]}: {cells[-1]}")
            cells[-1] = cells[-1].partition(":")[0]
    lines = []
    for number, line in enumerate(readable.format_table([head, *rows], right), start=-1):
        line = localize_commands(line)
        if number in marked:
            line = add_style(line, marked[number])
        lines.append(line)
    hidden_rows = len(table) - 1 - len(rows)
    if hidden_rows > 0:
        lines.append(f"and {hidden_rows} more in the files")
    notes = [readable.wrap("", localize_commands(note)) for note in (*long_notes, *sentences)]
    return "\n".join([*lines, "", *notes])


def as_markdown(
    title: str,
    command: str,
    table: Sequence[Sequence[str]],
    bold: Container[int],
    sentences: Sequence[str],
    *more: str,
) -> str:
    """Return Markdown to paste into an issue.

    Args:
        title: heading of the page.
        command: command line that was run.
        table: the header row, then all other rows.
        bold: indices of the rows in bold type; the first row below the header is 0.
        sentences: items of the list below the table.
        more: paragraphs at the end.
    """
    lines = [f"### {title}", "", f"    {command}", ""]
    for number, row in enumerate(table, start=-1):
        cells = [cell.replace("|", "\\|") for cell in row]
        if number in bold:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
        if number == -1:
            lines.append(f"| {' | '.join(['---'] * len(row))} |")
    lines.append("")
    lines += [f"- {sentence}" for sentence in sentences]
    lines.append("")
    for paragraph in more:
        lines += [paragraph, ""]
    return "\n".join(lines)


def describe_versions(versions: Mapping[str, str | None]) -> str:
    known_versions = [f"{name} {versions[name]}" for name in versions if versions[name]]
    return f"Versions: {', '.join(known_versions)}."


class TrialsProgress:
    """Progress lines: number of finished trials, result and duration of each, and time left.

    The time left is the number of remaining trials times the time that has passed per trial that
    ran. Trials of an earlier command do not count as trials that ran.

    Args:
        total: number of trials; a command may change it when trials are added or left out.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.ran = 0
        self.start_time = time.monotonic()

    def tell(self, what: str, outcome: TrialOutcome, news: str) -> None:
        """Print the line of a trial: `news` if it succeeded, otherwise its error."""
        self.done += 1
        duration = ""
        if outcome.seconds is not None:
            self.ran += 1
            elapsed = time.monotonic() - self.start_time
            left = (self.total - self.done) * elapsed / self.ran
            duration = f", {outcome.seconds:.0f} s; {tqdm.format_interval(left)} left"
        if outcome.error is not None:
            news = f"exit {outcome.error.code}: {outcome.error}"
        say(f"[{self.done}/{self.total}] {what}: {news}{duration}")


def report_files(folder: Path, name: str, curves: Path, draw: Callable[[], Sequence[Path]]) -> None:
    """Draw the pictures and print the names of the files.

    An error while drawing is printed and not raised, because it must not hide the results.
    """
    pictures = []
    try:
        pictures = [path.name for path in draw()]
    except Exception as error:
        say(f"  no pictures: {describe(error)}")
    files = [f"{folder}/{name}.md", ".csv", ".json", *pictures]
    say(f"  tables   {', '.join(files)}")
    say(f"  watch    python -m trainer tensorboard {shlex.quote(str(curves))}")


def read_machine() -> Json:
    """Return processor, number of cores, memory, GPUs and operating system."""
    import torch

    return {
        "cpu": host.read_processor_name(),
        "cores": resources.count_cores(),
        "memory_bytes": host.total_memory(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(cards.detect().count)],
        "system": platform.platform(),
    }


def describe_machine(machine: Json) -> str:
    parts = [
        machine["cpu"],
        f"{machine['cores']} cores",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        *machine["gpus"],
        machine["system"],
    ]
    return f"Machine: {', '.join(parts)}."


class OtherProcesses:
    """Meter of the CPU time that other processes use after the creation of this object.

    Steal time, during which the host runs other virtual machines, counts too.
    """

    def __init__(self) -> None:
        self.start_time = time.perf_counter()
        self.busy = sum(host.read_core_seconds())
        self.ours = _own_core_seconds()

    def cores(self) -> float | None:
        """Return the mean number of cores that other processes have used; None if it is unknown.

        Call this when no child process is running: until a child ends, it counts as another
        process.
        """
        busy = sum(host.read_core_seconds())
        if not busy or not self.busy:
            return None
        ours = _own_core_seconds() - self.ours
        elapsed = time.perf_counter() - self.start_time
        return max(0.0, (busy - self.busy - ours) / elapsed)


def _own_core_seconds() -> float:
    """Return the CPU time of this process and of the processes it started that have ended."""
    return sum(os.times()[:4])


def is_busy(cores: float | None) -> bool:
    """Return whether other processes use so many cores that measured speeds are unreliable.

    If `cores` is None, their use is unknown, and the result is False.
    """
    return cores is not None and cores >= max(BUSY, BUSY_FRACTION * resources.count_cores())

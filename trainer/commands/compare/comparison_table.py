"""The comparison, as compare.json has it, for terminals, as compare.csv and compare.md, and as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.trials import report as reports
from trainer.commands.trials.significance import ERROR, LOOKS, MARGIN
from trainer.processes.terminal import RED
from trainer.telemetry import plots, readable
from trainer.telemetry.events import Events

CSV_COLUMNS = (
    "entry", "mode", "words", "ranks", "threads", "repeats", "samples_per_sec", "samples_per_sec_std", "ratio",
    "ratio_low", "ratio_high", "reference", "compared", "step_time_s", "peak_memory_bytes", "train_loss", "val_top1",
    "exactness", "deviation", "label", "error", "exit_code",
)  # fmt: skip


def csv_rows(entries: Sequence[Mapping[str, Any]]) -> list[Sequence[Any]]:
    """Entries as compare.json has them, with a column for each of CSV_COLUMNS."""
    rows: list[Sequence[Any]] = [CSV_COLUMNS]
    for row in entries:
        speed, ratio, compared = (row[key] or {} for key in ("samples_per_sec", "ratio", "compared"))
        flat = {
            "words": " ".join(row["words"]),
            "samples_per_sec": speed.get("mean"),
            "samples_per_sec_std": speed.get("std"),
            "ratio": ratio.get("median"),
            "ratio_low": ratio.get("low"),
            "ratio_high": ratio.get("high"),
            "compared": compared.get("verdict"),
            "peak_memory_bytes": max(row["peak_memory_bytes"].values(), default=None),
            "exactness": row["exactness"]["text"],
            "deviation": row["exactness"]["deviation"],
        }
        rows.append([{**row, **flat}[column] for column in CSV_COLUMNS])
    return rows


def columns(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table in words, its head first."""
    to = rows[0]["reference"]
    head = ["entry", "ranks x threads", "images/s", f"ratio to {to}", "compared", "step ms", "peak GiB", "loss"]
    table = [[*head, "maths", "note"]]
    for row in rows:
        speed, ratio, step, loss = (row[key] for key in ("samples_per_sec", "ratio", "step_time_s", "train_loss"))
        peak = max(row["peak_memory_bytes"].values(), default=None)
        shares = f" ({' + '.join(map(str, row['shares']))} images)" if row["shares"] else ""
        cells = [
            row["entry"],
            f"{row['ranks']} x {row['threads']}{shares}" if speed or not row["error"] else "-",
            spread(speed["mean"], speed["std"]) if speed else "-",
            f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-",
            row["compared"]["verdict"] if row["compared"] else "",
            readable.number(1e3 * step) if step else "-",
            f"{peak / 2**30:.2f}" if peak else "-",
            f"{loss:.4f}" if loss is not None else "-",
            row["exactness"]["text"],
            f"exit {row['exit_code']}: {row['error']}" if row["error"] else row["label"],
        ]
        table.append(cells)
    return table


def as_text(report: Mapping[str, Any]) -> str:
    """The table for a terminal; rows that disagree are red."""
    head, *rows = columns(report["entries"])
    head[4] = ""
    return reports.as_text([head, *rows], {2, 5, 6, 7}, dict.fromkeys(disagreeing(report), RED), report["conclusion"])


def disagreeing(report: Mapping[str, Any]) -> list[int]:
    return [n for n, row in enumerate(report["entries"]) if row["exactness"]["verdict"] == "disagrees"]


def as_markdown(report: Mapping[str, Any]) -> str:
    """To paste into an issue: command, table, what it says, how it was measured, machine, versions."""
    title, table = f"{report['recipe']}: {len(report['entries'])} ways compared", columns(report["entries"])
    machine = f"{reports.machine_line(report['machine'])}\n{reports.versions_line(report['versions'])}"
    more = method(report), machine
    return reports.as_markdown(title, report["command"], table, disagreeing(report), report["conclusion"], *more)


def method(report: Mapping[str, Any]) -> str:
    """How the figures came about, and what they may be taken to say."""
    runs = f"{report['repeats']} interleaved repeat{'s' * (report['repeats'] != 1)} in fresh processes"
    looks = "" if report["asked"]["repeats"] else f", over looks after {', '.join(map(str, LOOKS))} repeats"
    steps = f" of {report['steps']} steps" if report["steps"] else ""
    size = f", {report['warmup_steps']} of them warm-up and left out, global batch {report['batch_size']}"
    return (
        f"{runs}{steps}{size}; images/s: mean +- standard deviation over repeats; ratio: median (least-greatest) of "
        f"the repeats' ratios. A difference is shown where the confidence interval of the paired ratios lies beyond "
        f"+-{MARGIN:.0%} (t-tests, plain and trimmed; all claims together wrong in at most {ERROR:.0%} of "
        f"comparisons: Holm{looks}). Maths: the first losses against single's."
    )


def spread(mean: float, std: float | None) -> str:
    """Mean and standard deviation, with as many decimals; without the latter where there is none.

    A mean that is smaller than its deviation is no figure.
    """
    shown = readable.number(mean)
    if std is None:
        return shown
    return "scatters" if std > mean else f"{shown} +- {std:,.{len(shown.partition('.')[2])}f}"


def draw(folder: Path, report: Mapping[str, Any], first: Path) -> list[Path]:
    """compare.png, and the same in TensorBoard beside the curves of the first entry, in the folder `first`: a run of
    its own would have none, of which Custom Scalars warns.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    bars, path, most = [], folder / "compare.png", report["repeats"]
    for row, cells in zip(report["entries"], columns(report["entries"])[1:], strict=True):
        speed, ratio = row["samples_per_sec"], row["ratio"]
        words = f"{cells[2].replace('+-', '±')}" if speed else f"exit {row['exit_code']}"
        words += f",  {ratio['median']:.2f}x" if ratio else ""
        words += f"  ({row['label'].partition(':')[0]})" if row["label"] and speed else ""
        bars.append((row["entry"], speed and speed["mean"], (speed or {}).get("std") or 0.0, words))
    title = f"{report['recipe']}, global batch {report['batch_size']}: mean and standard deviation of {most} repeat"
    plots.bars(path, bars, "images per second", title + "s" * (most != 1))
    for old in first.parent.glob("*/*.compared"):
        old.unlink()
    writer = Events(first, ".compared")
    picture = Summary.Image(encoded_image_string=path.read_bytes())
    writer.add(Summary(value=[Summary.Value(tag="compare/1_compare", image=picture)]), 0)
    writer.close()
    return [path]

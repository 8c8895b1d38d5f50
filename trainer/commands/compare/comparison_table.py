"""Tables of a comparison, from the content of compare.json.

`as_text` returns the table for a terminal, `build_csv_rows` and `as_markdown` return the content of
files, and `draw` makes a picture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.commands.trials import report as reports
from trainer.commands.trials.significance import ERROR, LOOKS, MARGIN
from trainer.processes.terminal import RED
from trainer.saving.files import Json
from trainer.telemetry import plots, readable
from trainer.telemetry.events import Events

# Symbols in the chart, by the verdict on the difference between an entry and the reference.
CLAIMS = {"faster": "▲", "slower": "▼"}
CSV_COLUMNS = (
    "entry",
    "mode",
    "words",
    "ranks",
    "threads",
    "repeats",
    "samples_per_sec",
    "samples_per_sec_std",
    "ratio",
    "ratio_low",
    "ratio_high",
    "reference",
    "compared",
    "step_time_s",
    "peak_memory_bytes",
    "train_loss",
    "val_top1",
    "exactness",
    "deviation",
    "label",
    "error",
    "exit_code",
)


def build_csv_rows(entries: Sequence[Json]) -> list[Sequence[Any]]:
    """Return CSV_COLUMNS as the header row, then one row per entry of compare.json."""
    rows: list[Sequence[Any]] = [CSV_COLUMNS]
    for entry in entries:
        speed = entry["samples_per_sec"] or {}
        ratio = entry["ratio"] or {}
        compared = entry["compared"] or {}
        cells = {
            **entry,
            "words": " ".join(entry["words"]),
            "samples_per_sec": speed.get("mean"),
            "samples_per_sec_std": speed.get("std"),
            "ratio": ratio.get("median"),
            "ratio_low": ratio.get("low"),
            "ratio_high": ratio.get("high"),
            "compared": compared.get("verdict"),
            "peak_memory_bytes": max(entry["peak_memory_bytes"].values(), default=None),
            "exactness": entry["exactness"]["text"],
            "deviation": entry["exactness"]["deviation"],
        }
        rows.append([cells[column] for column in CSV_COLUMNS])
    return rows


def build_cells(entries: Sequence[Json]) -> list[list[str]]:
    """Return the cells of the printed table: the header row, then one row per entry."""
    table = [
        [
            "entry",
            "ranks x threads",
            "images/s",
            f"ratio to {entries[0]['reference']}",
            "compared",
            "step ms",
            "peak GiB",
            "loss",
            "maths",
            "note",
        ]
    ]
    for entry in entries:
        speed = entry["samples_per_sec"]
        ratio = entry["ratio"]
        step_time = entry["step_time_s"]
        loss = entry["train_loss"]
        peak = max(entry["peak_memory_bytes"].values(), default=None)
        processes = "-"
        if speed or not entry["error"]:
            processes = f"{entry['ranks']} x {entry['threads']}"
            if entry["shares"]:
                processes += f" ({' + '.join(map(str, entry['shares']))} images)"
        ratio_text = "-"
        if ratio:
            ratio_text = f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
        note = entry["label"]
        if entry["error"]:
            note = f"exit {entry['exit_code']}: {entry['error']}"
        table.append(
            [
                entry["entry"],
                processes,
                spread(speed["mean"], speed["std"]) if speed else "-",
                ratio_text,
                entry["compared"]["verdict"] if entry["compared"] else "",
                readable.format_number(1e3 * step_time) if step_time else "-",
                f"{peak / 2**30:.2f}" if peak else "-",
                f"{loss:.4f}" if loss is not None else "-",
                entry["exactness"]["text"],
                note,
            ]
        )
    return table


def as_text(report: Json) -> str:
    """Return the table for a terminal. Rows that disagree with the reference are red."""
    head, *rows = build_cells(report["entries"])
    # `reports.as_text` omits a column without any text. Remove the title of the column "compared",
    # so that the column is omitted if nothing was compared.
    head[4] = ""
    red_rows = dict.fromkeys(find_disagreeing(report), RED)
    return reports.as_text([head, *rows], {2, 5, 6, 7}, red_rows, report["conclusion"])


def find_disagreeing(report: Json) -> list[int]:
    """Return the indices of the entries whose results differ from those of `single`."""
    return [
        number
        for number, entry in enumerate(report["entries"])
        if entry["exactness"]["verdict"] == "disagrees"
    ]


def as_markdown(report: Json) -> str:
    """Return Markdown to paste into an issue.

    The page has the command, the table, the conclusion, the method, the machine and the versions.
    """
    return reports.as_markdown(
        f"{report['recipe']}: {len(report['entries'])} entries compared",
        report["command"],
        build_cells(report["entries"]),
        find_disagreeing(report),
        report["conclusion"],
        describe_method(report),
        f"{reports.describe_machine(report['machine'])}\n"
        f"{reports.describe_versions(report['versions'])}",
    )


def describe_method(report: Json) -> str:
    """Describe how the speeds were measured and what a shown difference means."""
    runs = f"{readable.format_count(report['repeats'], 'interleaved repeat')} in fresh processes"
    looks = ""
    if not report["asked"]["repeats"]:
        looks = f", over looks after {', '.join(map(str, LOOKS))} repeats"
    steps = ""
    if report["steps"]:
        steps = f" of {report['steps']} steps"
    return (
        f"{runs}{steps}, {report['warmup_steps']} of them warm-up and left out, global batch "
        f"{report['batch_size']}; images/s: mean +- standard deviation over repeats; ratio: median "
        "(smallest-largest) of the repeats' ratios. A difference is shown if the confidence "
        f"interval of the paired ratios lies beyond +-{MARGIN:.0%} (t-tests, plain and trimmed; "
        f"all claims together wrong in at most {ERROR:.0%} of comparisons: Holm{looks}). Maths: "
        "the first losses against single's."
    )


def spread(mean: float, std: float | None) -> str:
    """Format a mean and its standard deviation with the same number of decimals.

    A mean that is smaller than its standard deviation says nothing, so "scatters" is shown instead.
    """
    text = readable.format_number(mean)
    if std is None:
        return text
    if std > mean:
        return "scatters"
    decimals = len(text.partition(".")[2])
    return f"{text} +- {std:,.{decimals}f}"


def draw(folder: Path, report: Json, first: Path) -> list[Path]:
    """Draw compare.png and add the picture to TensorBoard.

    Args:
        folder: folder of the comparison.
        report: the content of compare.json.
        first: TensorBoard folder of the first entry, into which the picture is written. A folder
            with a picture and no curve would make TensorBoard's Custom Scalars warn.

    Returns:
        Paths of the pictures; none if no entry has a speed.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    bars = []
    marks = {}
    path = folder / "compare.png"
    repeats = set()
    entries = report["entries"]
    for entry, cells in zip(entries, build_cells(entries)[1:], strict=True):
        speed = entry["samples_per_sec"]
        # An entry without a measured speed has no bar.
        if not speed:
            continue
        text = cells[2].replace("+-", "±")
        if entry["ratio"]:
            text += f",  {entry['ratio']['median']:.2f}x"
        if entry["label"]:
            text += f"  ({entry['label'].partition(':')[0]})"
        bars.append((entry["entry"], speed["mean"], speed["std"] or 0.0, text))
        repeats.add(len(speed["runs"]))
        compared = entry["compared"] or {}
        if compared.get("verdict") in CLAIMS:
            marks[entry["entry"]] = CLAIMS[compared["verdict"]]
    if not bars:
        return []
    if len(repeats) > 1:
        counted = f"{min(repeats)} to {max(repeats)} repeats"
    else:
        counted = readable.format_count(min(repeats), "repeat")
    title = (
        f"{report['recipe']}, global batch {report['batch_size']}: mean and standard deviation "
        f"of {counted}"
    )
    if marks:
        title += f"\n▲ faster, ▼ slower: shown to differ from {entries[0]['reference']}"
    plots.draw_bars(path, bars, "images per second", title, marks)
    for old_events in first.parent.glob("*/*.compared"):
        old_events.unlink()
    writer = Events(first, ".compared")
    picture = Summary.Image(encoded_image_string=path.read_bytes())
    writer.add(Summary(value=[Summary.Value(tag="compare/speed", image=picture)]), 0)
    writer.close()
    return [path]

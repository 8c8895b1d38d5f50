"""`proof.md`, to paste into an issue: no path, no name of a user or a host, no variable of the environment."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

from trainer.commands.compare.conditions import BUSY
from trainer.commands.prove.proof import CheckFigures, Proof

PATH = re.compile(r"(?<![\w:/.~-])~?(?:/(?!dev/|proc/|sys/)[\w.@+~-]+)(?:/[\w.@+~-]+)+/?")
MARKS = {"right": "right", "wrong": "**WRONG**", "measured": "", "not here": "not here", "left out": "left out"}


def markdown(proof: Proof) -> str:
    machine, memory = proof["machine"], proof["machine"]["memory_bytes"]
    checks = proof["checks"]
    lines = [f"### {proof['sentence']}", ""]
    bad = [row for row in checks if row["status"] == "wrong"]
    lines += [f"- **{row['title']}**: {row['line']}. Try: {row['todo']}" for row in bad]
    lines += [""] * bool(bad)
    done = [row for row in checks if row["status"] not in ("left out",)]
    lines += ["| does it train right? | | found |", "| --- | --- | --- |"]
    lines += [
        f"| {row['title']} | {MARKS[row['status']]} | {_cell(row['line'])} |" for row in done if row["part"] == "right"
    ]
    fast = [row for row in done if row["part"] == "fast"]
    if fast:
        lines += ["", "| how fast? | found |", "| --- | --- |", *(f"| {row['title']} | {_fast(row)} |" for row in fast)]
    lines += _others(checks)
    left = [row["title"] for row in checks if row["status"] == "left out"]
    lines += ["", f"Left out in {proof['minutes']:g} minutes: {'; '.join(left)}."] * bool(left)
    parts = [machine["cpu"], f"{machine['cores']} cores", f"{memory / 2**30:.0f} GiB" if memory else ""]
    busy = proof["busy_cores"]
    lines += ["", f"Machine: {', '.join(filter(None, [*parts, *machine['gpus'], machine['system']]))}."]
    lines += [f"Other programs kept {busy:.1f} cores busy meanwhile."] * bool(busy and busy >= BUSY)
    versions = ", ".join(f"{name} {version}" for name, version in proof["versions"].items() if version)
    lines += [f"Versions: {versions}.", ""]
    lines += [
        "Figures are medians (least to most) of several, each in turn with the bare PyTorch that it is beside.",
        "",
    ]
    return anonymous("\n".join(lines))


def _fast(row: CheckFigures) -> str:
    return f"{MARKS[row['status']]} {_cell(row['line'])}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _others(checks: Sequence[CheckFigures]) -> list[str]:
    found = [(row, other) for row in checks for other in row["figures"].get("beside_others", ())]
    if not found:
        return []
    lines = ["", "| beside others on the same card | theirs | ours, of it | source |", "| --- | --- | --- | --- |"]
    for row, other in found:
        lines.append(
            f"| {row['title']} | {other['images_per_sec']:,} images/s ({other['what']}) | {other['share']:.0%} | "
            f"{other['source']} |"
        )
    return lines


def anonymous(text: str) -> str:
    """Without paths and the names of this user and this host."""
    text = PATH.sub("PATH", text)
    names = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with suppress(Exception):  # a user without a name
        names.append(getpass.getuser())
    for name in names:
        if len(name) > 1 and name not in ("root", "localhost", "cpu", "cuda", "gpu"):
            text = re.sub(rf"(?<![\w.=-]){re.escape(name)}(?![\w=-])", "NAME", text)
    return text

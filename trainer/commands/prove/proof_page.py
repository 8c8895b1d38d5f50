"""`proof.json`, made of outcomes, and of it `proof.md`, to paste into an issue: no path, no name of a user or a host.

The guide's page `prove` has the keys; people script on them.
"""

from __future__ import annotations

import getpass
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome
from trainer.commands.prove.fast import NETWORKS
from trainer.commands.trials import report as reports
from trainer.commands.trials.report import MachineFigures, busy_line

FORMAT = 1
LEAST_COST = 0.05  # of the speed: what costs less is not called the slow part

Proof = dict[str, Any]
PATH = re.compile(r"(?<![\w:/.~-])~?(?:/(?!dev/|proc/|sys/)[\w.@+~-]+)(?:/[\w.@+~-]+)+/?")
MARKS = {"right": "right", "wrong": "**WRONG**", "measured": "", "not here": "not here"}


def proof_of(
    runner: CheckRunner, checks: Sequence[Check], minutes: float, busy: float | None, machine: MachineFigures,
    versions: Mapping[str, str | None],
) -> Proof:  # fmt: skip
    """What is known so far; a check without an outcome is left out."""
    rows = []
    for check in checks:
        outcome = runner.outcomes.get(check.name, Outcome("left out", "no time for it"))
        about = {"name": check.name, "part": check.part, "title": check.title}
        rows.append({**about, **asdict(outcome), "todo": outcome.todo or None})
    statuses = [row["status"] for row in rows]
    counts = {status: statuses.count(status) for status in sorted({*statuses})}
    status = "wrong" if counts.get("wrong") else "incomplete" if counts.get("left out") else "right"
    speed = runner.figures(f"speed {NETWORKS[runner.devices.kind][0].name} x{runner.devices.count}")
    times, slow = speed.get("times_one"), slow_part(runner.devices, speed)
    return {
        "format": FORMAT, "status": status, "sentence": sentence(runner.devices, rows, times, slow),
        "kind": runner.devices.kind, "devices": list(runner.devices.names), "times_one": times, "slow_part": slow,
        "counts": counts, "checks": rows, "minutes": minutes, "seconds": round(sum(row["seconds"] for row in rows), 1),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "busy_cores": busy, "machine": asdict(machine),
        "versions": dict(versions),
    }  # fmt: skip


def sentence(devices: Devices, rows: Sequence[Mapping[str, Any]], times: float | None, slow: str | None) -> str:
    """The last line: what is right, how much faster all devices are than one, and what to look at for speed."""
    where = devices.called(devices.count)
    if bad := [row for row in rows if row["status"] == "wrong"]:
        more = f" (and {len(bad) - 1} more)" * (len(bad) > 1)
        return f"something is WRONG on {where}: {bad[0]['title']}: {bad[0]['line']}{more}"
    possible = [row["status"] for row in rows if row["part"] == "right" and row["status"] != "not here"]
    done = possible.count("right")
    if not done:
        return f"nothing is proven on {where} yet"
    parts = [f"trains correctly on {where}"]
    if done < len(possible):
        parts = [f"{done} of {len(possible)} checks of correctness ({len(rows)} checks in all) say that it trains"]
        parts[0] += f" correctly on {where}, the others were skipped"
    parts += [f"{times:.2g} times as fast as one"] if times else []
    parts += [f"the slow part is {slow}"] if slow else []
    return "; ".join(parts)


def slow_part(devices: Devices, speed: Mapping[str, Any]) -> str | None:
    """What takes most of the speed that the devices could have, by the figures of the first network on all of them."""
    if not speed:
        return None
    ratio, optimizer = speed["ratio"]["median"], (speed.get("step") or {}).get("optimizer", 0.0)
    waits = speed.get("exposed_communication") or 0.0
    costs = {
        f"communication ({waits:.0%} of a step)": waits,
        f"the optimizer ({optimizer:.0%} of a step)": optimizer,
        f"this software's own loop ({ratio:.2f} times a bare one)": 1 - ratio,
    }
    if speed.get("times_one"):
        lost = 1 - speed["times_one"] / devices.count - waits
        costs[f"what the devices share ({lost:.0%} is lost between them)"] = lost
    name = max(costs, key=costs.__getitem__)
    return name if costs[name] >= LEAST_COST else f"computing {NETWORKS[devices.kind][0].title} itself"


def markdown(proof: Proof) -> str:
    checks = proof["checks"]
    bad = [f"**{row['title']}**: {row['line']}. Try: {row['todo']}" for row in checks if row["status"] == "wrong"]
    marked = [row for row in checks if row["status"] in MARKS]
    table = [["check", "", "found"], *([row["title"], MARKS[row["status"]], row["line"]] for row in marked)]
    more = []
    if left := [row["title"] for row in checks if row["status"] == "left out"]:
        more.append(f"Skipped in {proof['minutes']:g} minutes: {'; '.join(left)}.")
    machine = f"Machine: {MachineFigures(**proof['machine'])}."
    more.append("\n".join([machine, *busy_line(proof["busy_cores"]), reports.versions_line(proof["versions"])]))
    more.append("Figures are medians (smallest to largest) of several, each measured in alternation with bare PyTorch.")
    words = ["prove", f"minutes={proof['minutes']:g}", f"devices=[{','.join(proof['devices'])}]"]
    command = shlex.join(["python", "-m", "trainer", *words])
    return anonymous(reports.as_markdown(proof["sentence"], command, table, (), bad, *more))


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

"""`proof.json`, made of outcomes, and of it `proof.md` and `proof.png`, to paste into an issue: no path, no name of a
user or a host, no environment variable. The guide's page `prove` has the keys; people script on them.
"""

from __future__ import annotations

import getpass
import re
import shlex
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome
from trainer.commands.prove.fast import NETWORKS
from trainer.commands.trials import report as reports
from trainer.commands.trials.report import BUSY, MachineFigures
from trainer.telemetry import readable
from trainer.telemetry.plots import COLOURS, INK, canvas, save_picture

FORMAT = 1
LEAST_COST = 0.05  # of the speed: what costs less is not called the slow part

Proof = dict[str, Any]
PATH = re.compile(r"(?<![\w:/.~-])~?(?:/(?!dev/|proc/|sys/)[\w.@+~-]+)(?:/[\w.@+~-]+)+/?")
MARKS = {"right": "right", "wrong": "**WRONG**", "measured": "", "not here": "not here"}
BLUE, ORANGE, GREEN, RED = COLOURS[:4]
SIGNS = {"right": ("o", GREEN), "wrong": ("X", RED), "not here": ("_", INK), "left out": ("_", INK)}
ROW = 0.235  # inches of a line on the left
BARS = ((-0.2, "images_per_sec", BLUE, "trainer"), (0.2, "bare_images_per_sec", ORANGE, "a bare PyTorch loop"))


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
    times, slow = speed.get("times_one"), slow_part(runner, speed)
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
        parts = [f"{done} of {len(possible)} checks say that it trains correctly on {where}, the others were skipped"]
    parts += [f"{times:.2g} times as fast as one"] if times else []
    parts += [f"the slow part is {slow}"] if slow else []
    return "; ".join(parts)


def slow_part(runner: CheckRunner, speed: Mapping[str, Any]) -> str | None:
    """What takes most of the speed that the devices could have, by the figures of the first network on all of them."""
    if not speed:
        return None
    network = NETWORKS[runner.devices.kind][0].title
    ratio, optimizer = speed["ratio"]["median"], (speed.get("step") or {}).get("optimizer", 0.0)
    waits = speed.get("exposed_communication") or 0.0
    costs = {
        f"communication ({waits:.0%} of a step)": waits,
        f"the optimizer ({optimizer:.0%} of a step)": optimizer,
        f"this software's own loop ({ratio:.2f} times a bare one)": 1 - ratio,
    }
    if speed.get("times_one"):
        lost = 1 - speed["times_one"] / runner.devices.count - waits
        costs[f"what the devices share ({lost:.0%} is lost between them)"] = lost
    if times := runner.figures("readers").get("share_of_what_the_network_takes"):
        costs[f"reading photos ({times:.2g} times what {network} takes)"] = 1 - times
    name = max(costs, key=costs.__getitem__)
    return name if costs[name] >= LEAST_COST else f"computing {network} itself"


Row = Mapping[str, Any]


def markdown(proof: Proof) -> str:
    checks = proof["checks"]
    bad = [f"**{row['title']}**: {row['line']}. Try: {row['todo']}" for row in checks if row["status"] == "wrong"]
    right, fast = [["does it train correctly?", "", "found"]], [["how fast?", "found"]]
    beside = [["beside others on the same card", "theirs", "ours, of it", "source"]]
    for row in checks:
        title, mark = row["title"], MARKS.get(row["status"])
        if mark is not None:
            cells = [mark, row["line"]] if row["part"] == "right" else [f"{mark} {row['line']}".strip()]
            (right if row["part"] == "right" else fast).append([title, *cells])
        for other in row["figures"].get("beside_others", ()):
            theirs = f"{other['images_per_sec']:,} images/s ({other['what']})"
            beside.append([title, theirs, f"{other['share']:.0%}", other["source"]])
    more = ["\n".join(readable.markdown_table(table)) for table in (fast, beside) if len(table) > 1]
    if left := [row["title"] for row in checks if row["status"] == "left out"]:
        more.append(f"Skipped in {proof['minutes']:g} minutes: {'; '.join(left)}.")
    busy = proof["busy_cores"] or 0.0
    others = f"Other programs kept {busy:.1f} cores busy meanwhile.\n" * (busy >= BUSY)
    more.append(f"Machine: {MachineFigures(**proof['machine'])}.\n{others}{reports.versions_line(proof['versions'])}")
    more.append("Figures are medians (smallest to largest) of several, each measured in alternation with bare PyTorch.")
    words = ["prove", f"minutes={proof['minutes']:g}", f"devices=[{','.join(proof['devices'])}]"]
    command = shlex.join(["python", "-m", "trainer", *words])
    return anonymous(reports.as_markdown(proof["sentence"], command, right, (), bad, *more))


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


def draw(path: Path, proof: Proof) -> None:
    """The picture: on the left what was checked, on the right images a second beside a bare loop."""
    rows = [row for row in proof["checks"] if row["part"] == "right"]
    speeds = [row for row in proof["checks"] if "images_per_sec" in row["figures"]]
    figure, (left, *others) = canvas(11 if speeds else 7.5, 1.0 + ROW * len(rows), 2 if speeds else 1)
    _list(left, rows)
    for axes in others:
        _bars(axes, speeds)
    colour = {"right": GREEN, "wrong": RED}.get(proof["status"], INK)
    title = "\n".join(textwrap.wrap(proof["sentence"], 100 if speeds else 70))
    figure.suptitle(title, color=colour, fontsize=12, fontweight="bold", x=0.02, ha="left")
    save_picture(figure, path)


def _list(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for place, row in enumerate(rows):
        status, title = row["status"], row["title"].replace("`", "")
        marker, colour = SIGNS[status]
        axes.plot(0.02, place, marker, color=colour, markersize=7)
        text = title if status in ("right", "wrong") else f"{title} ({status})"
        colour, weight = (RED, "bold") if status == "wrong" else (INK, "normal")
        axes.text(0.06, place, text, va="center", color=colour, fontsize=9, fontweight=weight)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """A pair for each network and number of devices, with the least and the most that was seen."""
    top = 1.0
    for place, row in enumerate(rows):
        for offset, key, colour, name in BARS:
            middle, low, high = (row["figures"][key][part] for part in ("median", "low", "high"))
            axes.barh(place + offset, middle, height=0.36, color=colour, label=None if place else name)
            spread = [[middle - low], [high - middle]]
            axes.errorbar(middle, place + offset, xerr=spread, color=INK, capsize=3, elinewidth=1.2)
            axes.text(high, place + offset, f"  {middle:,.0f}", va="center", ha="left", color=INK, fontsize=9)
            top = max(top, high)
    axes.set_yticks(range(len(rows)), [row["title"].replace(" on ", "\non ") for row in rows])
    axes.set_ylim(max(2.5, len(rows) - 0.4), -0.8)  # bars of one network are no thicker than those of two
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * top)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("images/s: the median, the smallest and the largest")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left", bbox_to_anchor=(0, 1.06), ncols=2)

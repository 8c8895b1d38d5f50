"""`proof.json`, made of outcomes. The guide's page `prove` has its keys; people script on it: keys are only added."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.commands.compare.comparison_report import MachineFigures
from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome
from trainer.commands.prove.fast import networks

FORMAT = 1
LEAST_COST = 0.05  # of the speed: what costs less is not called the slow part

Proof = dict[str, Any]


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
    speed = runner.figures(f"speed {networks(runner.devices)[0].name} x{runner.devices.count}")
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
    parts = [f"trains right on {where}"]
    if done < len(possible):
        parts = [f"{done} of {len(possible)} checks say that it trains right on {where}, the others were left out"]
    parts += [f"{times:.2g} times one"] if times else []
    parts += [f"the slow part is {slow}"] if slow else []
    return "; ".join(parts)


def slow_part(runner: CheckRunner, speed: Mapping[str, Any]) -> str | None:
    """What takes most of the speed that the devices could have, by the figures of the first network on all of them."""
    if not speed:
        return None
    network = networks(runner.devices)[0].title
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

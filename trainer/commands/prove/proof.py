"""`proof.json`: its keys, and how it is made of what the checks found. People script on it: keys are only added."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict, get_type_hints

from trainer.commands.compare.comparison_report import MachineFigures
from trainer.commands.prove.fast import networks
from trainer.commands.prove.outcome import Check, Outcome
from trainer.commands.prove.trip import Devices, Trip

FORMAT = 1
WORTH = 0.05  # of the speed: what costs less is not called the slow part


class CheckFigures(TypedDict):
    """One of `checks`."""

    name: str
    part: str
    title: str
    status: str
    line: str
    todo: str | None
    seconds: float
    figures: dict[str, Any]


class Proof(TypedDict):
    """All of it."""

    format: Annotated[int, "1; a number that grows when a key changes its meaning"]
    status: Annotated[str, "`right`; `wrong`; `incomplete` where nothing is wrong and some of the checks were left out"]
    sentence: Annotated[str, "the last line of the command"]
    kind: Annotated[str, "`cuda` or `cpu`"]
    devices: Annotated[list[str], "by name, one each; `cpu` for a process on the CPU"]
    times_one: Annotated[
        float | None, "images/s on all devices / on one, of the first network; null where not measured"
    ]
    slow_part: Annotated[str | None, "what costs most speed; null where nothing was measured"]
    counts: Annotated[dict[str, int], "checks by status"]
    checks: Annotated[
        list[CheckFigures],
        "each with `name`, `part` (`right`, `fast`), `title`, `status` (`right`, `wrong`, `measured`, `not here`, "
        "`left out`), `line`, `todo` (what to type; null where nothing is wrong), `seconds`, `figures`",
    ]
    minutes: Annotated[float, "that were allowed"]
    seconds: Annotated[float, "that the checks took, over all parts"]
    date: Annotated[str, "UTC, when it ended"]
    busy_cores: Annotated[float | None, "cores that other programs kept busy meanwhile; null where not known"]
    machine: Annotated[MachineFigures, "`cpu`, `cores`, `memory_bytes`, `gpus`, `system`"]
    versions: Annotated[dict[str, str | None], "trainer, python, torch, torchvision, cuda"]


def table() -> str:
    """The guide's table of keys."""
    hints = get_type_hints(Proof, include_extras=True)
    rows = [f"| `{key}` | {hint.__metadata__[0]} |" for key, hint in hints.items()]
    return "\n".join(["| key | meaning |", "| --- | --- |", *rows])


def proof_of(
    trip: Trip, checks: Sequence[Check], seconds: Mapping[str, float], minutes: float, busy: float | None,
    machine: MachineFigures, versions: Mapping[str, str | None],
) -> Proof:  # fmt: skip
    """What is known so far; a check without an outcome is left out."""
    outcomes = [trip.outcomes.get(check.name, Outcome("left out", "no time for it")) for check in checks]
    rows: list[CheckFigures] = [
        {
            "name": check.name, "part": check.part, "title": check.title, "status": found.status, "line": found.line,
            "todo": found.todo or None, "seconds": seconds.get(check.name, 0.0), "figures": dict(found.figures),
        }
        for check, found in zip(checks, outcomes, strict=True)
    ]  # fmt: skip
    counts = {
        status: sum(row["status"] == status for row in rows) for status in sorted({row["status"] for row in rows})
    }
    open_ones = counts.get("left out", 0)
    status = "wrong" if counts.get("wrong") else "incomplete" if open_ones else "right"
    times, slow = times_one(trip), slow_part(trip)
    return {
        "format": FORMAT, "status": status, "sentence": sentence(trip.devices, rows, times, slow),
        "kind": trip.devices.kind, "devices": list(trip.devices.names), "times_one": times, "slow_part": slow,
        "counts": counts, "checks": rows, "minutes": minutes, "seconds": round(sum(seconds.values()), 1),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "busy_cores": busy, "machine": machine,
        "versions": dict(versions),
    }  # fmt: skip


def sentence(devices: Devices, rows: Sequence[CheckFigures], times: float | None, slow: str | None) -> str:
    """The end: what is right, how much faster all devices are than one, and what to look at for speed."""
    where = devices.called(devices.count)
    bad = [row for row in rows if row["status"] == "wrong"]
    if bad:
        first = f"{bad[0]['title']}: {bad[0]['line']}"
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return f"something is WRONG on {where}: {first}{more}"
    known = [row for row in rows if row["part"] == "right" and row["status"] != "not here"]
    done = [row for row in known if row["status"] == "right"]
    if not done:
        return f"nothing is proven on {where} yet"
    parts = [f"trains right on {where}"]
    if len(done) < len(known):
        parts = [f"{len(done)} of {len(known)} checks say that it trains right on {where}, the others were left out"]
    parts += [f"{times:.2g} times one"] if times else []
    parts += [f"the slow part is {slow}"] if slow else []
    return "; ".join(parts)


def times_one(trip: Trip) -> float | None:
    found = trip.figures(f"speed {networks(trip.devices)[0].name} x{trip.devices.count}")
    return found.get("times_one")


def slow_part(trip: Trip) -> str | None:
    """What takes most of the speed that the devices could have, of what was measured."""
    network = networks(trip.devices)[0]
    found = trip.figures(f"speed {network.name} x{trip.devices.count}")
    if not found:
        return None
    ratio, step = found["ratio"]["median"], found.get("step") or {}
    waits, optimizer = found.get("exposed_communication") or 0.0, step.get("optimizer", 0.0)
    costs = {
        f"communication ({waits:.0%} of a step)": waits,
        f"the optimizer ({optimizer:.0%} of a step)": optimizer,
        f"this software's own loop ({ratio:.2f} times a bare one)": 1 - ratio,
    }
    if found.get("times_one"):
        lost = 1 - found["times_one"] / trip.devices.count - waits
        costs[f"what the devices share ({lost:.0%} is lost between them)"] = lost
    if share := trip.figures("readers").get("share_of_what_the_network_takes"):
        costs[f"reading photos ({share:.2g} times what {network.title} takes)"] = 1 - share
    name = max(costs, key=costs.__getitem__)
    return name if costs[name] >= WORTH else f"computing {network.title} itself"

"""`proof.json`: its keys, and how it is made of outcomes. People script on it: keys are only added."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypedDict, get_type_hints

from trainer.commands.compare.comparison_report import MachineFigures
from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome
from trainer.commands.prove.fast import networks

FORMAT = 1
LEAST_COST = 0.05  # of the speed: what costs less is not called the slow part


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
        list[dict[str, Any]],
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
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "busy_cores": busy, "machine": machine,
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

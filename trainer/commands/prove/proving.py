"""One proof from its first line to its last: what fits into the minutes, in which order, and what becomes of it.

Its folder is held under a lock and bound to one machine, and has every outcome as soon as there is one. Of outcomes
`proof.json` is made, and of it `proof.md`, to paste into an issue: no path, no name of a user or a host. The guide's
page `prove` has the keys; people script on them.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import re
import shlex
import shutil
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.commands.prove import fast, right
from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, wrong
from trainer.commands.prove.fast import NETWORKS
from trainer.commands.trials import report as reports
from trainer.commands.trials.engine import claim
from trainer.devices import cards
from trainer.errors import Interrupted, Preempted, RecipeError, in_one_line
from trainer.processes.terminal import say
from trainer.saving.files import read, usable_json, without_nan, write_atomically
from trainer.telemetry import readable
from trainer.training.reporting import versions

HOME = Path("runs/proof")
KEPT = "kept.json"
DONE = ("right", "measured")  # all else is tried again
ROW = TypeAdapter(Outcome)
FORMAT = 1
LEAST_COST = 0.05  # of the speed: what costs less is not called the slow part
Proof = dict[str, Any]
PATH = re.compile(r"(?<![\w:/.~-])~?(?:/(?!dev/|proc/|sys/)[\w.@+~-]+)(?:/[\w.@+~-]+)+/?")
MARKS = {"right": "right", "wrong": "**WRONG**", "measured": "", "not here": "not here"}


def bound_to(machine: Mapping[str, Any], versions: Mapping[str, Any], devices: tuple[str, ...]) -> dict[str, str]:
    """What a proof belongs to. The machine is written as digests alone: the file may be given away."""
    import torch

    identity = b""
    with suppress(OSError):
        identity = read("/etc/machine-id")
    uuids = [str(getattr(torch.cuda.get_device_properties(n), "uuid", n)) for n in range(cards.detect().count)]
    known = {"machine": [machine, identity.decode(errors="replace"), uuids], "versions": versions}
    digests = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
        for key, value in known.items()
    }
    return {**digests, "devices": ",".join(devices)}


def kept(folder: Path) -> dict[str, Outcome]:
    """Outcomes by the checks' names; what is damaged is done again."""
    outcomes, rows = {}, usable_json(folder / KEPT).get("checks")
    for name, row in (rows if isinstance(rows, dict) else {}).items():
        with suppress(ValidationError):
            outcomes[name] = ROW.validate_python(row)
    return outcomes


def prove(devices: Devices, minutes: float, output: str | None) -> str:
    """The proof's status, once its report is printed and written."""
    machine, software, others = reports.this_machine(), versions(), reports.Others()
    with claim(output, HOME, "proof", KEPT, bound_to(machine, software, devices.names)) as folder:
        proving = Proving(folder, devices, minutes)
        proving.announce()
        try:
            proving.run()
        finally:
            # What was wrong and not checked again is still wrong.
            proving.runner.outcomes = proving.outcomes
            proof = proof_of(proving.runner, proving.checks, minutes, others.cores(), machine, software)
            reports.write_tables(
                folder, "proof", json.loads(anonymous(json.dumps(without_nan(proof)))), markdown(proof)
            )
        report(folder, proof)
        return str(proof["status"])


class Proving:
    """The checks of one command, and the time that they take."""

    def __init__(self, folder: Path, devices: Devices, minutes: float) -> None:
        self.folder, self.minutes, self.outcomes = folder, minutes, kept(folder)
        self.begun = time.monotonic()
        self.checks = [*right.checks(devices), *fast.checks(devices)]
        done = {name: outcome for name, outcome in self.outcomes.items() if outcome.status in DONE}
        self.runner = CheckRunner(folder, devices, done)
        if any(outcome.status == "wrong" for outcome in self.outcomes.values()):
            for name in ("runs", "measured"):  # new runs must not be compared with those of a wrong machine
                shutil.rmtree(folder / name, ignore_errors=True)
        # seconds of the checks so far, and those that were expected; a first guess weighs as a minute of checks
        self.took = self.expected = 60.0

    def run(self) -> None:
        while chosen := self._chosen():
            self._do(chosen[0])

    def announce(self) -> None:
        """What will be done, and what will be left out. Raises RecipeError."""
        devices, chosen, waiting = self.runner.devices, self._chosen(), self._waiting()
        done = len(self.checks) - len(waiting)
        enough = math.ceil(1.1 * sum(map(self._takes, waiting)) / 60)
        if not chosen and not done:
            raise RecipeError(f"minutes={self.minutes:g} is too short for any check: type minutes={enough}")
        models = sorted({*devices.models} - {"CPU"})
        where = devices.called(devices.count) + (f" ({', '.join(models)})" if models else "")
        say(f"checking that this machine trains correctly, and how fast: {where}, {self.minutes:g} minutes")
        say(f"  results are kept in {self.folder}; if it is stopped, the same words continue it")
        if done:
            say(f"  {done} of {len(self.checks)} checks are done already")
        if chosen:
            minutes = math.ceil(sum(map(self._takes, chosen)) / 60)
            say(f"  {readable.counted(len(chosen), 'check')}, about {readable.counted(minutes, 'minute')}")
        if out := [check.title for check in waiting if check not in chosen]:
            text = f"skipped, for which minutes={enough} would do: {'; '.join(out)}"
            say(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))

    def _waiting(self) -> list[Check]:
        return [check for check in self.checks if check.name not in self.runner.outcomes]

    def _takes(self, check: Check) -> float:
        """Seconds, from what the checks before it took."""
        return check.seconds * self.took / self.expected

    def _chosen(self) -> list[Check]:
        """Those that fit into what is left, what counts most first; in the order in which they are done."""
        left, chosen = 60 * self.minutes - (time.monotonic() - self.begun), set()
        for check in sorted(self._waiting(), key=lambda check: check.priority):
            if (takes := self._takes(check)) <= left:
                left -= takes
                chosen.add(check.name)
        return [check for check in self._waiting() if check.name in chosen]

    def _do(self, check: Check) -> None:
        say(f"[{len(self.runner.outcomes) + 1:>2}/{len(self.checks)}] {check.title} ... ", end="")
        begun = time.monotonic()
        try:
            outcome = check.run(self.runner)
        except (KeyboardInterrupt, Interrupted, Preempted):
            say("stopped")
            raise
        except Exception as error:
            outcome = wrong(in_one_line(error)[0], "see the .log files in runs and measured beside proof.md")
        took = time.monotonic() - begun
        self.took, self.expected = self.took + took, self.expected + check.seconds
        outcome = self.outcomes[check.name] = self.runner.outcomes[check.name] = replace(
            outcome, seconds=round(took, 1)
        )
        rows = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        text = json.dumps({**usable_json(self.folder / KEPT), "checks": rows}, indent=1)
        write_atomically(self.folder / KEPT, text + "\n")
        status = {"wrong": "WRONG: ", "measured": ""}.get(outcome.status, f"{outcome.status}: ")
        say(f"{status}{outcome.line} ({took:.0f} s)")


def report(folder: Path, proof: Proof) -> None:
    say("")
    for row in proof["checks"]:
        if row["status"] == "wrong":
            say(f"  WRONG  {row['title']}: {row['line']}")
            say(f"         try: {row['todo'] or ''}")
    if out := proof["counts"].get("left out"):
        say(f"  {readable.counted(out, 'check')} skipped: the same words with more minutes= run them")
    for line in reports.busy_line(proof["busy_cores"]):
        say(f"  {line}")
    say(f"  report {folder}/proof.md, proof.json")
    say(proof["sentence"])


def proof_of(
    runner: CheckRunner, checks: Sequence[Check], minutes: float, busy: float | None, machine: Mapping[str, Any],
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
    machine = reports.machine_line(proof["machine"])
    more.append("\n".join([machine, *reports.busy_line(proof["busy_cores"]), reports.versions_line(proof["versions"])]))
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

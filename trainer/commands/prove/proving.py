"""Run one proof: choose the checks that fit into the time, run them, and report the outcomes.

The folder of a proof is locked and bound to one machine. Each outcome is stored there as soon as
the check ends. `proof.json` is built from the outcomes, and `proof.md` from its content. Users may
publish both files, so `anonymize` replaces paths and the names of the user and the host. The
guide's page `prove` lists the keys of `proof.json`, which scripts read.
"""

import getpass
import hashlib
import json
import math
import re
import shlex
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainer.commands.prove import fast, right
from trainer.commands.prove.check_runner import Check, CheckRunner, Devices, Outcome, wrong
from trainer.commands.trials import report as reports
from trainer.commands.trials.engine import claim_folder
from trainer.devices import cards
from trainer.errors import RecipeError, explain_in_one_line
from trainer.processes.resources import count_cores
from trainer.processes.terminal import fit, say
from trainer.saving.files import Json, read, read_json_or_empty, write_json
from trainer.telemetry.readable import format_count, wrap
from trainer.training.reporting import list_versions

DEFAULT_FOLDER = Path("runs/proof")
KEPT = "kept.json"
# Checks with one of these statuses are not run again by the next command.
DONE = ("right", "measured")
OUTCOME = TypeAdapter(Outcome)
FORMAT = 1
# The slow part is what costs the most speed. If nothing costs at least this fraction of the speed,
# computing the network itself is called the slow part.
LEAST_COST = 0.05
# Matches absolute paths and paths below ~, but not URLs, "ViT-B/16", "images/s" or /dev/shm.
PATH = re.compile(r"(?<![\w:/.~-])~?(?:/(?!dev/|proc/|sys/)[\w.@+~-]+)(?:/[\w.@+~-]+)+/?")
MARKS = {"right": "right", "wrong": "**WRONG**", "measured": "", "not here": "not here"}


def list_bindings(machine: Json, versions: Json, devices: tuple[str, ...]) -> dict[str, str]:
    """Return the conditions under which a proof is valid: machine, versions and devices.

    Machine and versions are digests, because the file that stores them may be passed on to others.
    """
    import torch

    machine_id = b""
    with suppress(OSError):
        machine_id = read("/etc/machine-id")
    uuids = []
    for number in range(cards.detect().count):
        properties = torch.cuda.get_device_properties(number)
        uuids.append(str(getattr(properties, "uuid", number)))
    return {
        "machine": _hash_value([machine, machine_id.decode(errors="replace"), uuids]),
        "versions": _hash_value(versions),
        "devices": ",".join(devices),
    }


def _hash_value(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_outcomes(folder: Path) -> dict[str, Outcome]:
    """Load the stored outcomes by the names of their checks. Damaged outcomes are skipped."""
    outcomes = {}
    rows = read_json_or_empty(folder / KEPT).get("checks")
    if isinstance(rows, dict):
        for name, row in rows.items():
            with suppress(ValidationError):
                outcomes[name] = OUTCOME.validate_python(row)
    return outcomes


def prove(devices: Devices, minutes: float, output: str | None) -> str:
    """Run the checks, write and print the report, and return the status of the proof.

    The status is "right", "wrong" or "incomplete".
    """
    machine = reports.read_machine()
    software = list_versions()
    others = reports.OtherProcesses()
    binding = list_bindings(machine, software, devices.names)
    with claim_folder(output, DEFAULT_FOLDER, "proof", KEPT, binding) as folder:
        proving = Proving(folder, devices, minutes)
        proving.announce()
        try:
            proving.run()
        finally:
            proof = build_proof(
                proving.runner, proving.checks, minutes, others.cores(), machine, software
            )
            anonymous_proof = json.loads(anonymize(json.dumps(proof)))
            reports.write_tables(folder, "proof", anonymous_proof, render_markdown(proof))
        report(folder, proof)
        return str(proof["status"])


class Proving:
    """The checks of one `prove` command, and the schedule for them.

    Args:
        folder: folder of the proof.
        devices: devices to check.
        minutes: time that the checks may take in total.
    """

    def __init__(self, folder: Path, devices: Devices, minutes: float) -> None:
        self.folder = folder
        self.minutes = minutes
        self.start_time = time.monotonic()
        # A wrong outcome counts until the check runs again.
        outcomes = load_outcomes(folder)
        self.runner = CheckRunner(folder, devices, outcomes)
        self.checks = [*right.list_checks(devices), *fast.list_checks(devices)]
        self.waiting = []
        for check in self.checks:
            if check.name not in outcomes or outcomes[check.name].status not in DONE:
                self.waiting.append(check)
        if any(outcome.status == "wrong" for outcome in outcomes.values()):
            # The stored runs and measurements are deleted: new runs must not be compared with runs
            # of a machine that was wrong.
            for name in ("runs", "measured"):
                shutil.rmtree(folder / name, ignore_errors=True)
        # Actual and expected seconds of the finished checks. Their ratio corrects the schedule;
        # the initial values weigh as much as one minute of checks.
        self.actual = 60.0
        self.expected = 60.0

    def run(self) -> None:
        while chosen := self._choose():
            self._run_check(chosen[0])

    def announce(self) -> None:
        """Print which checks will run and which are skipped.

        Raises:
            RecipeError: the time is too short for any check.
        """
        devices = self.runner.devices
        chosen = self._choose()
        finished = len(self.checks) - len(self.waiting)
        enough = math.ceil(1.1 * self._estimate(self.waiting) / 60)
        if not chosen and not finished:
            raise RecipeError(
                f"minutes={self.minutes:g} is too short for any check: type minutes={enough}"
            )
        shown_devices = devices.called(devices.count)
        models = sorted({*devices.models} - {"CPU"})
        if models:
            shown_devices += f" ({', '.join(models)})"
        say(
            f"checking that this machine trains correctly, and how fast: {shown_devices}, "
            f"{self.minutes:g} minutes"
        )
        say(f"  results are kept in {self.folder}; if it is stopped, the same command resumes it")
        if finished:
            say(f"  {finished} of {len(self.checks)} checks are done already")
        if chosen:
            minutes = math.ceil(self._estimate(chosen) / 60)
            say(f"  {format_count(len(chosen), 'check')}, about {format_count(minutes, 'minute')}")
        skipped = [check.title for check in self.waiting if check not in chosen]
        if skipped:
            text = f"type minutes={enough} to run these too: {'; '.join(skipped)}"
            say(wrap("  skipped, ", text))

    def _estimate(self, checks: Sequence[Check]) -> float:
        """Estimate the seconds of `checks`, corrected by how long finished checks really took."""
        return sum(check.seconds * self.actual / self.expected for check in checks)

    def _choose(self) -> list[Check]:
        """Return the checks that fit into the time left, in the order in which they run.

        Checks are chosen by priority. If a check does not fit, shorter ones after it may still fit.
        """
        left = 60 * self.minutes - (time.monotonic() - self.start_time)
        chosen = set()
        for check in sorted(self.waiting, key=lambda check: check.priority):
            seconds = self._estimate([check])
            if seconds <= left:
                left -= seconds
                chosen.add(check.name)
        return [check for check in self.waiting if check.name in chosen]

    def _run_check(self, check: Check) -> None:
        self.waiting.remove(check)
        number = len(self.checks) - len(self.waiting)
        start = f"[{number:>2}/{len(self.checks)}] {check.title} ... "
        say(start, end="")
        begun = time.monotonic()
        others = reports.OtherProcesses()
        try:
            outcome = check.run(self.runner)
        except KeyboardInterrupt:
            say("stopped")
            raise
        except Exception as error:
            line = explain_in_one_line(error)[0]
            outcome = wrong(line, "see the .log files in runs and measured next to proof.md")
        if check.part == "fast":
            # On a busy machine speeds are meaningless, and any device can look slow, so the outcome
            # is discarded and the next command measures again.
            cores = others.cores()
            if reports.is_busy(cores):
                line = f"other processes used {cores:.1f} of {count_cores()} cores"
                outcome = Outcome("left out", line, figures={"busy_cores": cores})
        seconds = time.monotonic() - begun
        self.actual += seconds
        self.expected += check.seconds
        outcomes = self.runner.outcomes
        outcomes[check.name] = replace(outcome, seconds=round(seconds, 1))
        rows = {name: asdict(stored) for name, stored in outcomes.items()}
        write_json(self.folder / KEPT, {**read_json_or_empty(self.folder / KEPT), "checks": rows})
        status = {"wrong": "WRONG: ", "measured": ""}.get(outcome.status, f"{outcome.status}: ")
        text = fit(f"{start}{status}{outcome.line} ({seconds:.0f} s)")
        say(text.removeprefix(fit(start)))


def report(folder: Path, proof: Json) -> None:
    """Print failed and skipped checks, the files, and the last line of the proof."""
    say("")
    for row in proof["checks"]:
        if row["status"] == "wrong":
            say(f"  WRONG  {row['title']}: {row['line']}")
            say(f"         try: {row['todo'] or ''}")
    disturbed = sum("busy_cores" in row["figures"] for row in proof["checks"])
    skipped = proof["counts"].get("left out", 0) - disturbed
    if skipped:
        say(
            f"  {format_count(skipped, 'check')} skipped: the same command with a larger "
            "minutes= runs them"
        )
    if disturbed:
        say(
            f"  other processes disturbed {format_count(disturbed, 'measurement')}: stop them (top "
            "shows which), then the same command measures again"
        )
    say(f"  report {folder}/proof.md, proof.json")
    say(proof["sentence"])


def build_proof(
    runner: CheckRunner,
    checks: Sequence[Check],
    minutes: float,
    busy_cores: float | None,
    machine: Json,
    versions: Mapping[str, str | None],
) -> Json:
    """Build the content of proof.json. A check without an outcome has the status "left out"."""
    rows = []
    counts = Counter[str]()
    for check in checks:
        outcome = runner.outcomes.get(check.name, Outcome("left out", "no time for it"))
        row = {"name": check.name, "part": check.part, "title": check.title, **asdict(outcome)}
        rows.append({**row, "todo": outcome.todo or None})
        counts[outcome.status] += 1
    status = "right"
    if "wrong" in counts:
        status = "wrong"
    elif "left out" in counts:
        status = "incomplete"
    devices = runner.devices
    speed = runner.figures(f"speed {fast.NETWORKS[devices.kind][0].name} x{devices.count}")
    times = speed.get("times_one")
    slow = find_slow_part(devices, speed)
    return {
        "format": FORMAT,
        "status": status,
        "sentence": summarize(devices, rows, times, slow),
        "kind": devices.kind,
        "devices": list(devices.names),
        "times_one": times,
        "slow_part": slow,
        "counts": dict(sorted(counts.items())),
        "checks": rows,
        "minutes": minutes,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "busy_cores": busy_cores,
        "machine": machine,
        "versions": versions,
    }


def summarize(devices: Devices, rows: Sequence[Json], times: float | None, slow: str | None) -> str:
    """Return the last line: whether training is correct, the speedup, and what costs most speed.

    Args:
        devices: devices that were checked.
        rows: the value of "checks" in proof.json.
        times: speed of all devices relative to one device; None if it was not measured.
        slow: what `find_slow_part` returned.
    """
    where = devices.called(devices.count)
    wrong_rows = [row for row in rows if row["status"] == "wrong"]
    if wrong_rows:
        first = wrong_rows[0]
        line = f"something is WRONG on {where}: {first['title']}: {first['line']}"
        if len(wrong_rows) > 1:
            line += f" (and {len(wrong_rows) - 1} more)"
        return line
    statuses = [row["status"] for row in rows if row["part"] == "right"]
    possible = len(statuses) - statuses.count("not here")
    passed = statuses.count("right")
    if not passed:
        return f"nothing is proven on {where} yet"
    parts = [f"trains correctly on {where}"]
    if passed < possible:
        parts = [
            f"{passed} of {possible} checks of correctness ({len(rows)} checks in all) say that it "
            f"trains correctly on {where}, the others were skipped"
        ]
    if times:
        parts.append(f"{times:.2g} times as fast as one")
    if slow:
        parts.append(f"the slow part is {slow}")
    return "; ".join(parts)


def find_slow_part(devices: Devices, speed: Json) -> str | None:
    """Describe the largest loss of speed. Return None if the speed was not measured.

    Args:
        devices: devices that were checked.
        speed: figures of the first network on all devices; without "ratio" if not measured.
    """
    if "ratio" not in speed:
        return None
    ratio = speed["ratio"]["median"]
    optimizer = (speed.get("step") or {}).get("optimizer", 0.0)
    exposed = speed.get("exposed_communication") or 0.0
    costs = {
        f"communication ({exposed:.0%} of a step)": exposed,
        f"the optimizer ({optimizer:.0%} of a step)": optimizer,
        f"this software's own loop ({ratio:.2f} times a bare one)": 1 - ratio,
    }
    if speed.get("times_one"):
        lost = 1 - speed["times_one"] / devices.count - exposed
        costs[f"what the devices share ({lost:.0%} is lost between them)"] = lost
    name = max(costs, key=costs.__getitem__)
    if costs[name] >= LEAST_COST:
        return name
    return f"computing {fast.NETWORKS[devices.kind][0].title} itself"


def render_markdown(proof: Json) -> str:
    """Return the content of proof.md."""
    wrong_lines = []
    table = [["check", "", "result"]]
    skipped = []
    for row in proof["checks"]:
        status = row["status"]
        if status in MARKS:
            table.append([row["title"], MARKS[status], row["line"]])
        if status == "wrong":
            wrong_lines.append(f"**{row['title']}**: {row['line']}. Try: {row['todo']}")
        elif status == "left out":
            skipped.append(f"{row['title']} ({row['line']})")
    paragraphs = []
    if skipped:
        paragraphs.append(f"Skipped in {proof['minutes']:g} minutes: {'; '.join(skipped)}.")
    paragraphs += [
        f"{reports.describe_machine(proof['machine'])}\n"
        f"{reports.describe_versions(proof['versions'])}",
        "Figures are medians (smallest to largest) of several, each measured in alternation with "
        "bare PyTorch.",
    ]
    devices = f"devices=[{','.join(proof['devices'])}]"
    command = f"python -m trainer prove minutes={proof['minutes']:g} {shlex.quote(devices)}"
    page = reports.as_markdown(proof["sentence"], command, table, (), wrong_lines, *paragraphs)
    return anonymize(page)


def anonymize(text: str) -> str:
    """Replace paths and the names of this user and this host."""
    text = PATH.sub("PATH", text)
    host = socket.gethostname()
    names = [host, host.partition(".")[0]]
    # getpass raises if the user has no name, as in some containers.
    with suppress(Exception):
        names.append(getpass.getuser())
    for name in names:
        # Replacing a very common name would damage the text, and such a name identifies nobody.
        if len(name) > 1 and name not in ("root", "localhost", "cpu", "cuda", "gpu"):
            text = re.sub(rf"(?<![\w.=-]){re.escape(name)}(?![\w=-])", "NAME", text)
    return text

"""One proof from its first line to its last: what fits into the minutes, in which order, and what becomes of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from trainer.commands.compare.conditions import BUSY, Others, this_machine
from trainer.commands.prove import fast, kept, proof_plot, right
from trainer.commands.prove.fast import LIBRARIES
from trainer.commands.prove.kept import Kept
from trainer.commands.prove.outcome import Check, Outcome, wrong
from trainer.commands.prove.proof import Proof, proof_of
from trainer.commands.prove.proof_page import anonymous, markdown
from trainer.commands.prove.trip import Devices, Trip
from trainer.errors import Interrupted, Preempted, RecipeError, in_one_line
from trainer.processes.started import as_typed
from trainer.saving.run_folder import write_atomically
from trainer.telemetry.tracking import without_nan
from trainer.training.reporting import versions

QUIET_START = 3.0  # seconds that Python takes to load torch and torchvision on a machine that nothing else uses


def prove(devices: Devices, minutes: float, output: str | None) -> str:
    """The proof's status, when it is told and written."""
    machine, software = this_machine(), versions()
    bound = kept.bound_to({**machine}, software, devices.names)
    with kept.claim(output, bound) as found:
        proving = Proving(found, devices, minutes)
        proving.announce()
        try:
            proving.run()
        finally:
            proving.trip.outcomes = found.outcomes()  # what was wrong and not asked again is wrong still
            proof = proof_of(
                proving.trip, proving.checks, proving.seconds(), minutes, proving.others.cores(), machine, software
            )
            write(found.folder, proof)
        tell(found.folder, proof)
        return proof["status"]


class Proving:
    """One part of a proof under way."""

    def __init__(self, found: Kept, devices: Devices, minutes: float) -> None:
        self.kept, self.devices, self.minutes = found, devices, minutes
        self.begun, self.others = time.monotonic(), Others()
        self.checks = [*right.checks(devices), *fast.checks(devices)]
        self.trip = Trip(found.folder, devices, found.outcomes(*kept.DONE))
        if any(row["status"] == "wrong" for row in found.checks.values()):
            found.start_over()
        self.slower = 1.0  # than a quiet machine
        self.spent: list[tuple[float, float]] = []  # seconds of each check, and those that were foretold

    def seconds(self) -> dict[str, float]:
        return {check.name: self.kept.seconds(check.name) for check in self.checks}

    def left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self) -> None:
        while (check := next(iter(self._chosen()), None)) is not None:
            self._one(check)

    def announce(self) -> None:
        """What will be done, and what will be left out.

        Raises:
            RecipeError: there is no time for anything.
        """
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", LIBRARIES], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        self.slower = min(5.0, max(1.0, (time.monotonic() - begun) / QUIET_START))
        chosen, waiting = self._chosen(), self._waiting()
        done = len(self.checks) - len(waiting)
        if not chosen and not done:
            enough = math.ceil(self._all() / 60)
            raise RecipeError(f"minutes={self.minutes:g} is too short for any check: type minutes={enough}")
        say(f"proving that this machine trains right, and how fast: {self._where()}, {self.minutes:g} minutes")
        say(f"  what is done is kept in {self.kept.folder}; stopped, the same words go on")
        if done:
            say(f"  {done} of {len(self.checks)} checks are done already")
        if chosen:
            total = sum(self._takes(check) for check in chosen) / 60
            say(f"  {counted(len(chosen), 'check')}, about {counted(math.ceil(total), 'minute')}")
        if out := [check.title for check in waiting if check not in chosen]:
            listed = f"left out, for which minutes={math.ceil(self._all() / 60)} would do: {'; '.join(out)}"
            say(textwrap.fill(listed, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))

    def _where(self) -> str:
        models = sorted(set(self.devices.models))
        return self.devices.called(self.devices.count) + (f" ({', '.join(models)})" if models != ["CPU"] else "")

    def _all(self) -> float:
        return 1.1 * sum(self._takes(check) for check in self._waiting())

    def _waiting(self) -> list[Check]:
        return [check for check in self.checks if check.name not in self.trip.outcomes]

    def _takes(self, check: Check) -> float:
        """Seconds, from what the checks before it took."""
        took, foretold = (sum(values) for values in zip(*self.spent, strict=True)) if self.spent else (0.0, 0.0)
        return check.seconds * (took + 60 * self.slower) / (foretold + 60)  # the guess weighs as a minute of checks

    def _chosen(self) -> list[Check]:
        """Those that fit into what is left, what counts most first; in the order in which they are done."""
        left, chosen = self.left(), set()
        for check in sorted(self._waiting(), key=lambda check: check.rank):
            if (takes := self._takes(check)) <= left:
                left -= takes
                chosen.add(check.name)
        return [check for check in self._waiting() if check.name in chosen]

    def _one(self, check: Check) -> None:
        number = len(self.trip.outcomes) + 1
        say(f"[{number:>2}/{len(self.checks)}] {check.title} ... ", end="")
        begun = time.monotonic()
        try:
            outcome = check.run(self.trip)
        except (KeyboardInterrupt, Interrupted, Preempted):
            say("stopped")
            raise
        except Exception as error:
            outcome = wrong(in_one_line(error)[0], "see the folder logs beside proof.md")
        seconds = time.monotonic() - begun
        self.spent.append((seconds, check.seconds))
        self.trip.outcomes[check.name] = outcome
        self.kept.keep(check.name, outcome, seconds)
        say(f"{told(outcome)} ({seconds:.0f} s)")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def told(outcome: Outcome) -> str:
    if outcome.status == "wrong":
        return f"WRONG: {outcome.line}"
    return outcome.line if outcome.status == "measured" else f"{outcome.status}: {outcome.line}"


def write(folder: Path, proof: Proof) -> None:
    """proof.json, proof.md and proof.png, each replaced at once."""
    text = json.dumps(without_nan(proof), indent=2, allow_nan=False)
    write_atomically(folder / "proof.json", anonymous(text) + "\n")
    write_atomically(folder / "proof.md", markdown(proof))
    proof_plot.draw(folder / "proof.png", proof)


def tell(folder: Path, proof: Proof) -> None:
    say("")
    for row in proof["checks"]:
        if row["status"] == "wrong":
            say(f"  WRONG  {row['title']}: {row['line']}")
            say(f"         try: {row['todo'] or ''}")
    if out := [row for row in proof["checks"] if row["status"] == "left out"]:
        say(f"  {counted(len(out), 'check')} left out: the same words with more minutes= go on with them")
    if (busy := proof["busy_cores"]) and busy >= BUSY:
        say(f"  other programs kept {busy:.1f} cores busy meanwhile, which makes figures of speed smaller")
    say(f"  report {folder}/proof.md, proof.json, proof.png")
    say(proof["sentence"])


def say(text: str, end: str = "\n") -> None:
    print(as_typed(text), end=end, flush=True)

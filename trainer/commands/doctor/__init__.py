"""`python -m trainer doctor`: what this machine offers to training, and what is wrong with it.

It repairs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.commands.doctor import machine
from trainer.errors import RecipeError, SetupError
from trainer.processes.terminal import say

BUFFERS = 2**28  # bytes that loader workers share for a usual batch of photos


def command(words: Sequence[str]) -> int:
    """Print everything that the checks at a run's start see; 0, or 3 where something is wrong."""
    if words:
        raise RecipeError(f"doctor takes no words, not '{words[0][:80]}': type python -m trainer doctor")
    report = examine()
    say(report.text())
    return SetupError.code if report.problems else 0


def examine() -> machine.Findings:
    """Look at everything. A check that fails becomes a problem of one line, and the others follow."""
    report = machine.Findings()
    if report.trying("software", machine.versions, report):
        cards = report.trying("cards", machine.check_cards, report) or 0
        report.trying("processes", machine.talking, report, cards)
        from trainer.data.workers import worker_counts  # needs torch

        report.trying("shared memory", worker_counts.check_shared_memory, BUFFERS)
    report.trying("machine", machine.resources, report)
    report.trying("environment", machine.variables, report)
    return report

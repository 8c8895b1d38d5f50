"""What was found: rows in sections, and problems, each with what to type."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from trainer.errors import explain, is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")
WIDTH = 120


@dataclass
class Findings:
    """The report of `doctor` as it grows."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def row(self, section: str, name: str, value: object) -> None:
        self.sections.setdefault(section, []).append((name, " ".join(str(value).split())))

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def trying(self, what: str, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `look` returns; None and a problem of one line if it fails."""
        try:
            return check(*args, **kwargs)
        except Exception as error:
            line, code = explain(error)
            if code == 1 or is_out_of_memory(error):
                line = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.problem(line)
            return None

    def text(self) -> str:
        """The report: sections of aligned rows, and last what is wrong."""
        width = max((len(name) for rows in self.sections.values() for name, _ in rows), default=0)
        lines = []
        for title, rows in self.sections.items():
            lines += [title, *(line for name, value in rows for line in _wrapped(f"  {name:{width}}  ", value)), ""]
        if not self.problems:
            return "\n".join([*lines, "all good"])
        lines.append("1 problem:" if len(self.problems) == 1 else f"{len(self.problems)} problems:")
        for number, problem in enumerate(self.problems, 1):
            lines += _wrapped(f"{number}. ", problem)
        return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    """Lines of a text that begins after `start`; words and paths stay whole, to be copied."""
    room = max(40, WIDTH - len(start))
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [start + lines[0], *(" " * len(start) + line for line in lines[1:])]

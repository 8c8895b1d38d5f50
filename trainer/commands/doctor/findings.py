"""What was found: rows in sections, and problems, each with what to type."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from trainer.errors import in_one_line

P = ParamSpec("P")
T = TypeVar("T")


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
        """What `check` returns; None and a problem of one line if it fails."""
        try:
            return check(*args, **kwargs)
        except Exception as error:
            line, code = in_one_line(error)
            self.problem(f"{what}: {line}" if code == 1 else line)
            return None

    def text(self) -> str:
        """The report: sections of aligned rows, and last what is wrong."""
        width = max((len(name) for rows in self.sections.values() for name, _ in rows), default=0)
        lines = []
        for title, rows in self.sections.items():
            lines += [title, *(_wrapped(f"  {name:{width}}  ", value) for name, value in rows), ""]
        if not self.problems:
            return "\n".join([*lines, "all good"])
        lines.append("1 problem:" if len(self.problems) == 1 else f"{len(self.problems)} problems:")
        return "\n".join([*lines, *(_wrapped(f"{n}. ", problem) for n, problem in enumerate(self.problems, 1))])


def _wrapped(start: str, text: str) -> str:
    """Lines of a text that begins after `start`; words and paths stay whole, to be copied."""
    indent = " " * len(start)
    return textwrap.fill(text, 120, initial_indent=start, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip

"""Source files can be read at first sight: goals for counts of what makes them hard to read.

Tokens are counted, not lines, so that joining lines cannot improve a figure.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command_line import PROJECT
from tests.layers import ROOT, analyze, count_by_line, count_tokens

# Wording that PyTorch's documentation does not use, or that hides the subject of a sentence.
DIALECT = re.compile(
    r"\b(so many|so much|anew|told|beside|but for|of which|of whom|by which|from here on|be it"
    r"|in place of|is to be|are to be|is none|of it|where there is|where there are|once more|mine"
    r"|on the spot|so long|by and by|as yet|room|door|house)\b",
    re.IGNORECASE,
)
# First words that are no subject, verb or article of a sentence.
BAD_STARTS = re.compile(
    r"\W*(of|from|in|for|by|with|without|within|at|on|to|as|beside|than|which|whose|who|whom|where"
    r"|what|those|that|these|this|it|its|they|their|he|one|all|each|every|such|so)\b",
    re.IGNORECASE,
)
DENSE = 24  # tokens of a line
DIRECTIVE = re.compile(r"type: ignore|noqa|fmt:")


class Readability(NamedTuple):
    """Figures of a set of files."""

    tokens_per_line: float  # Number without comments, docstrings and blank lines.
    dense_lines: float  # lines with more than `DENSE` tokens, of 1,000
    bad_starts: float  # docstrings and comments with one of `BAD_STARTS` first, in percent
    dialect: float  # phrases of `DIALECT` in 10,000 words of docstrings and comments


def measure(paths: Iterable[Path]) -> Readability:
    """Measure all files together."""
    tokens_by_line: list[int] = []
    texts: list[str] = []
    for path in paths:
        source = path.read_text()
        tokens_by_line += [count for count in count_by_line(source).values() if count]
        texts += find_prose(source)
    words = sum(len(text.split()) for text in texts)
    phrases = sum(len(DIALECT.findall(text)) for text in texts)
    return Readability(
        tokens_per_line=sum(tokens_by_line) / len(tokens_by_line),
        dense_lines=1000 * sum(count > DENSE for count in tokens_by_line) / len(tokens_by_line),
        bad_starts=100 * sum(bool(BAD_STARTS.match(text)) for text in texts) / len(texts),
        dialect=10_000 * phrases / words,
    )


def find_prose(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a file, except directives for tools."""
    tree, tokens = analyze(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
    # Comments on consecutive lines are one text.
    comment: list[str] = []
    last_line = 0
    for token in tokens:
        if token.type != tokenize.COMMENT or DIRECTIVE.search(token.string):
            continue
        is_own_line = not token.line[: token.start[1]].strip()
        if comment and not (is_own_line and token.start[0] == last_line + 1):
            yield " ".join(comment)
            comment = []
        comment.append(token.string.lstrip("# "))
        last_line = token.start[0]
    if comment:
        yield " ".join(comment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "goals"),
    [
        (ROOT, Readability(tokens_per_line=8.2, dense_lines=15, bad_starts=8, dialect=4)),
        (
            PROJECT / "tests",
            Readability(tokens_per_line=9.5, dense_lines=31, bad_starts=10, dialect=5),
        ),
    ],
    ids=["trainer", "tests"],
)
def test_code_and_prose_can_be_read_at_first_sight(folder, goals):
    measured = measure(folder.rglob("*.py"))
    for name, value, goal in zip(measured._fields, measured, goals, strict=True):
        assert value <= goal, f"{name}: {value:.1f}, and the goal is {goal}"


def test_readability_is_measured(tmp_path):
    file = tmp_path / "file.py"
    file.write_text(
        '"""Of a file."""\n\n# A comment, told twice.\na = b\nc = [' + "d, " * 12 + "]  # one\n"
    )
    measured = measure([file])
    # 3 and 28 tokens; one of three texts starts badly, and one of nine words is dialect.
    assert measured.tokens_per_line == (3 + 28) / 2
    assert measured.dense_lines == 500
    assert round(measured.bad_starts) == 67
    assert round(measured.dialect) == round(10_000 / 8)


@pytest.mark.slow
def test_the_package_keeps_its_token_budget():
    """The budget is the number in CONTRIBUTING."""
    (most,) = re.findall(
        r"at most ([\d,]+) tokens", (PROJECT / ".github" / "CONTRIBUTING.md").read_text()
    )
    assert sum(count_tokens(path.read_text()) for path in ROOT.rglob("*.py")) <= int(
        most.replace(",", "")
    )


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("a = b\n", 3),
        ("a = b  # why\n", 3),
        ("a = (\n    b\n)\n", 5),
        ('"""A page."""\n\na = "text"\n', 3),
        ('def f():\n    """Do it."""\n    return 1\n', 7),
        ("a = f'{b} and {f(c)}'\n", 3),
        ("a = f'{f\"{b}\"}' 'c'\n", 4),
    ],
)
def test_tokens_are_counted(source, tokens):
    assert count_tokens(source) == tokens

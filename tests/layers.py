"""Packages of `trainer`, their imports, and counts of their tokens.

`python -m tests.layers` prints the drawing and the table of .github/CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import trainer

ROOT = Path(trainer.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def package_of(path: Path) -> str:
    """Return the name of the package, or of the module directly in `trainer`, of a file."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = ("trainer", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
# The tokenizer of Python 3.12 splits f-strings into parts. An f-string counts as one token, as in
# older versions.
STRING_STARTS = ("FSTRING_START", "TSTRING_START")
STRING_ENDS = ("FSTRING_END", "TSTRING_END")


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


@cache
def analyze(source: str) -> tuple[ast.Module, list[tokenize.TokenInfo]]:
    """Return the syntax tree and the tokens of a source text, which take seconds for a package."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    return ast.parse(source), tokens


@cache
def count_by_line(source: str) -> Counter[int]:
    """Return the number of tokens of each line: names, operators, numbers and strings.

    Docstrings and comments do not count.
    """
    tree, tokens = analyze(source)
    skipped = docstring_lines(tree)
    counts: Counter[int] = Counter()
    depth = 0
    for token in tokens:
        line = token.start[0]
        kind = tokenize.tok_name[token.type]
        if kind in STRING_STARTS:
            depth += 1
            if depth == 1:
                counts[line] += 1
        elif kind in STRING_ENDS:
            depth -= 1
        elif depth == 0 and token.type in COUNTED and line not in skipped:
            counts[line] += 1
    return counts


def count_tokens(source: str) -> int:
    """Return the number of tokens, which the size budget counts: joining lines cannot lower it."""
    return count_by_line(source).total()


@cache
def find_imports(path: Path, at_once: bool = False) -> set[str]:
    """Return the modules of `trainer` that a file imports.

    Args:
        at_once: leave out imports inside functions.
    """
    names: set[str] = set()
    tree = parse(path)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("trainer.")}
    return names & MODULES.keys()


def packages_of(modules: set[str]) -> set[str]:
    """Return the packages of modules by their dotted names."""
    return {name.split(".")[1] for name in modules}


def package_imports() -> dict[str, set[str]]:
    """Return each package with the packages that it imports."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        package = package_of(path)
        graph.setdefault(package, set()).update(packages_of(find_imports(path)) - {package})
    return graph


def draw() -> str:
    """Return a Mermaid graph with an arrow from each package to those that it imports.

    Arrows that a longer path implies are left out.
    """
    graph = package_imports()

    def reached_from(package: str) -> Iterator[str]:
        for imported in graph[package]:
            yield imported
            yield from reached_from(imported)

    lines = ["graph TD"]
    for package in sorted(graph):
        implied = {far for imported in graph[package] for far in reached_from(imported)}
        for imported in sorted(graph[package] - implied):
            lines.append(f"    {package.strip('_')} --> {imported}")
    return "\n".join(["```mermaid", *lines, "```"])


def table() -> str:
    """Return a Markdown table of the first paragraph of each package's docstring."""
    lines = ["| package | contents |", "| --- | --- |"]
    for folder in sorted({path.parent for path in FILES} - {ROOT}):
        if folder.parent == ROOT:
            docstring = ast.get_docstring(parse(folder / "__init__.py")) or ""
            contents = " ".join(docstring.partition("\n\n")[0].split())
            lines.append(f"| `{folder.name}/` | {contents} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw(), table(), sep="\n\n")

"""The picture of the house in .github/CONTRIBUTING.md, made from the imports: `python -m tests.house` prints it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import trainer

HOME = Path(trainer.__file__).parent
FILES = [path for path in sorted(HOME.rglob("*.py")) if path != HOME / "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    return ".".join(("trainer", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path): path for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path, at_once: bool = False) -> set[str]:
    """Modules of ours that a file imports; `at_once`: as it is imported itself."""
    found = set()
    tree = parsed(path)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("trainer.")}
    return found & MODULES.keys()


def rooms() -> dict[str, set[str]]:
    """Each room, with the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        others = {name.split(".")[1] for name in imported(path)} - {room(path)}
        found.setdefault(room(path), set()).update(others)
    return found


def picture() -> str:
    """A Mermaid graph: an arrow leads to what is imported; one that a longer way implies is left out."""
    graph = rooms()

    def below(name: str) -> Iterator[str]:
        for other in graph[name]:
            yield other
            yield from below(other)

    lines = ["graph TD"]
    for name in sorted(graph):
        implied = {far for other in graph[name] for far in below(other)}
        lines += [f"    {name.strip('_')} --> {other}" for other in sorted(graph[name] - implied)]
    return "\n".join(["```mermaid", *lines, "```"])


def table() -> str:
    """What lives in each room, in its own words."""
    lines = ["| room | what lives there |", "| --- | --- |"]
    for folder in sorted({path.parent for path in FILES} - {HOME}):
        if folder.parent == HOME:
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            lines.append(f"| `{folder.name}/` | {' '.join(text.partition(chr(10) * 2)[0].split())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture(), table(), sep="\n\n")

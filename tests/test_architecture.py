"""Imports go one way: a room imports only rooms from floors below its own, and says which."""

import ast
import re
from pathlib import Path

import pytest

import trainer

FLOORS = [  # the ground floor first; rooms of one floor do not know each other
    {"errors"},
    {"recipe"},
    {"devices"},
    {"processes"},
    {"saving"},
    {"data", "launch", "models", "pool", "telemetry"},
    {"modes"},
    {"training"},
    {"doctor", "inference", "planning"},
    {"comparison"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
HOME = Path(trainer.__file__).parent
FILES = [path for path in sorted(HOME.rglob("*.py")) if path != HOME / "__init__.py"]
FOLDERS = sorted({path.parent for path in FILES} - {HOME})


def room(path: Path) -> str:
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    return ".".join(("trainer", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path): path for path in FILES}


def imported(path: Path, at_once: bool = False) -> set[str]:
    """Modules of ours that a file imports; `at_once`: as it is imported itself."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("trainer.")}
    return found & MODULES.keys()


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_imports_go_down(path):
    own = room(path)
    assert own in FLOOR, f"{own} has no floor above"
    for other in rooms_of(imported(path)) - {own}:
        assert FLOOR[other] < FLOOR[own], f"{own} imports {other}, which is not below it"


def test_no_module_imports_itself_in_a_circle():
    graph = {name: imported(path, at_once=True) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        for other in graph[name] - done:
            follow(other, (*way, name))
        done.add(name)

    for name in graph:
        follow(name, ())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(HOME)))
def test_a_room_says_what_lives_there_and_what_it_imports(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first, _, rest = text.partition("\n\n")
    assert 1 <= len(first.splitlines()) <= 2 and first.endswith(".") and rest
    if folder.parent == HOME:
        own = room(folder / "__init__.py")
        found = set().union(*(rooms_of(imported(path)) for path in folder.rglob("*.py"))) - {own}
        said = re.search(r"^Imports: ([\w, ]+)\.$", text, re.M)
        assert said, f"Imports: {', '.join(sorted(found, key=FLOOR.get))}."
        assert {*said[1].split(", ")} == found, sorted(found, key=FLOOR.get)


def test_nothing_lies_loose():
    assert {path.name for path in HOME.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}

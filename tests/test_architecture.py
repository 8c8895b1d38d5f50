"""Imports go one way: a room imports only rooms from floors below its own, and says which."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests.command_line import PROJECT
from tests.house import FILES, HOME, MODULES, imported, parsed, picture, room, table

FLOORS = [  # the ground floor first; rooms of one floor do not know each other
    {"errors"},
    {"recipe"},
    {"devices", "tasks"},
    {"processes"},
    {"pool", "saving"},
    {"launch", "models", "telemetry"},
    {"data"},
    {"modes"},
    {"optim"},
    {"training"},
    {"cli", "commands"},
    {"__main__"},
]
OWNERS = {  # what is delicate is done in one place
    "flock(": "saving/locks.py",
    "memfd_create(": "processes/memory_file.py",
    "prctl(": "processes/family.py",
    "subprocess.Popen(": "processes/family.py",
}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FOLDERS = sorted({path.parent for path in FILES} - {HOME})


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_imports_go_down(path):
    own = room(path)
    assert own in FLOOR, f"{own} has no floor above"
    for other in rooms_of(imported(path)) - {own}:
        assert FLOOR[other] < FLOOR[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize("home", sorted({folder.parent for folder in FOLDERS} - {HOME}), ids=lambda path: path.name)
def test_rooms_within_a_room_form_no_circle(home):
    graph: dict[str, set[str]] = {}
    for path in (path for path in FILES if home in path.parent.parents):
        own, *others = (
            other.relative_to(home).parts[0]
            for other in (path, *(MODULES[name] for name in imported(path)))
            if home in other.parent.parents
        )
        graph.setdefault(own, set()).update({*others} - {own})
    assert list(TopologicalSorter(graph).static_order())


def test_no_module_imports_itself_in_a_circle():
    graph = {name: imported(path, at_once=True) - {name} for name, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_what_is_private_stays_in_its_file(path):
    assert borrowed(parsed(path)) == []


def borrowed(tree: ast.Module) -> list[str]:
    """Private names of other modules of ours that a module uses."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    froms = [node for node in froms if (node.module or "").split(".")[0] == "trainer"]
    ours = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = [alias for alias in node.names if alias.name.split(".")[0] == "trainer"]
            ours |= {alias.asname or alias.name: alias.name for alias in whole}
    if not ours:
        return []
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ours]
    found = [f"{ours[ast.unparse(node.value)]}.{node.attr}" for node in used] + list(ours.values())
    return [name for name in found if re.search(r"\._(?!_)", name)]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from trainer.pool.stream import _lane", ["trainer.pool.stream._lane"]),
        ("from trainer.pool import stream; stream._lane", ["trainer.pool.stream._lane"]),
        ("import trainer.pool.stream as stream; stream._lane()", ["trainer.pool.stream._lane"]),
        ("import trainer.pool.stream; trainer.pool.stream._lane", ["trainer.pool.stream._lane"]),
        ("from trainer.pool import stream; stream.Lane.__name__; self._lane; torch._C", []),
    ],
)
def test_what_would_be_borrowed(line, found):
    assert borrowed(ast.parse(line)) == found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(HOME)))
def test_a_room_says_what_lives_there_and_what_it_imports(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first, _, rest = text.partition("\n\n")
    assert 1 <= len(first.splitlines()) <= 2 and first.endswith(".") and rest
    if folder.parent == HOME:
        own = room(folder / "__init__.py")
        found = set().union(*(rooms_of(imported(path)) for path in folder.rglob("*.py"))) - {own}
        said = re.search(r"^Imports: ([\w,\s]+)\.$", text, re.M)
        assert said, f"Imports: {', '.join(sorted(found, key=FLOOR.get))}."
        assert {*re.split(r",\s+", said[1])} == found, sorted(found, key=FLOOR.get)


@pytest.mark.parametrize("call", OWNERS)
def test_what_is_delicate_has_one_owner(call):
    assert [str(path.relative_to(HOME)) for path in FILES if call in path.read_text()] == [OWNERS[call]]


def test_a_class_has_a_name_of_its_own():
    bodies = {path: parsed(path).body for path in FILES}
    named = [(node.name, path) for path, body in bodies.items() for node in body if isinstance(node, ast.ClassDef)]
    homes = dict(named)
    assert [(name, path) for name, path in named if homes[name] != path] == []


@pytest.mark.parametrize("path", [path for path in FILES if room(path) != "__main__"], ids=lambda path: path.name)
def test_nothing_imports_the_package_itself(path):
    """Its name is the API above all rooms: what a room needs of it, as the version, lives on a floor below."""
    names = [alias.name for node in ast.walk(parsed(path)) if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.module == "trainer"]
    assert "trainer" not in names
    assert {alias.name for node in froms for alias in node.names} <= FLOOR.keys()


def test_nothing_lies_loose():
    assert {path.name for path in HOME.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_the_picture_for_newcomers_is_of_this_house():
    page = (PROJECT / ".github" / "CONTRIBUTING.md").read_text()
    for part in (picture(), table()):
        assert part in page, f"python -m tests.house prints:\n{part}"


def test_the_house_does_not_grow():
    """Beyond the number that CONTRIBUTING has."""
    (most,) = re.findall(r"at most ([\d,]+) lines", (PROJECT / ".github" / "CONTRIBUTING.md").read_text())
    assert sum(len(path.read_text().splitlines()) for path in HOME.rglob("*.py")) <= int(most.replace(",", ""))

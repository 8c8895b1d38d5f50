"""Imports go one way: a package imports only packages of lower layers, and lists them."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests.command_line import PROJECT
from tests.layers import (
    FILES,
    MODULES,
    ROOT,
    draw,
    find_imports,
    package_of,
    packages_of,
    parse,
    table,
)

# Packages from the lowest layer upwards. Packages of one layer do not import each other.
LAYERS = [
    {"errors", "versions"},
    {"recipe"},
    {"devices", "tasks"},
    {"memory", "processes"},
    {"distributed", "pool", "saving"},
    {"launch", "models", "telemetry"},
    {"data"},
    {"modes", "optim"},
    {"training"},
    {"cli", "commands"},
    {"__main__"},
]
# Delicate system calls, each with the one module that makes them.
OWNERS = {
    "flock(": "saving/locks.py",
    "memfd_create(": "processes/memory_file.py",
    "prctl(": "processes/family.py",
    "subprocess.Popen(": "processes/family.py",
}
# Modules whose functions accept a whole `Run`. All others accept the objects that they use.
# The module of the memory keys builds a run as a probe and resumes one that ran out of memory.
WHOLE_RUN = {
    "training/loop.py",
    "training/setup.py",
    "training/memory_keys.py",
    "training/checking.py",
}
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
FOLDERS = sorted({path.parent for path in FILES} - {ROOT})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = package_of(path)
    assert own in LAYER, f"{own} is in no layer"
    for other in packages_of(find_imports(path)) - {own}:
        assert LAYER[other] < LAYER[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize(
    "home", sorted({folder.parent for folder in FOLDERS} - {ROOT}), ids=lambda path: path.name
)
def test_subpackages_form_no_import_cycle(home):
    graph: dict[str, set[str]] = {}
    for path in (path for path in FILES if home in path.parent.parents):
        own, *others = (
            other.relative_to(home).parts[0]
            for other in (path, *(MODULES[name] for name in find_imports(path)))
            if home in other.parent.parents
        )
        graph.setdefault(own, set()).update({*others} - {own})
    assert list(TopologicalSorter(graph).static_order())


def test_modules_form_no_import_cycle():
    graph = {name: find_imports(path, at_once=True) - {name} for name, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_modules_form_no_import_cycle_through_functions_or_types():
    """Includes imports in functions and under TYPE_CHECKING, in all packages except recipe."""
    graph = {
        name: find_imports(path) - {name}
        for name, path in MODULES.items()
        if package_of(path) != "recipe"
    }
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stay_in_their_file(path):
    assert borrowed(parse(path)) == []


def borrowed(tree: ast.Module) -> list[str]:
    """Return the private names of other modules of ours that a module uses."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    froms = [node for node in froms if (node.module or "").split(".")[0] == "trainer"]
    ours = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in froms
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = [alias for alias in node.names if alias.name.split(".")[0] == "trainer"]
            ours |= {alias.asname or alias.name: alias.name for alias in whole}
    if not ours:
        return []
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ours
    ]
    actual = [f"{ours[ast.unparse(node.value)]}.{node.attr}" for node in used] + list(ours.values())
    return [name for name in actual if re.search(r"\._(?!_)", name)]


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
def test_use_of_private_names_is_detected(line, found):
    assert borrowed(ast.parse(line)) == found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_describes_its_contents_and_lists_its_imports(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first, _, rest = text.partition("\n\n")
    assert 1 <= len(first.splitlines()) <= 2 and first.endswith(".") and rest
    if folder.parent == ROOT:
        own = package_of(folder / "__init__.py")
        actual = set().union(
            *(packages_of(find_imports(path)) for path in folder.rglob("*.py"))
        ) - {own}
        match = re.search(r"^Imports: ([\w,\s]+)\.$", text, re.M)
        assert match, f"Imports: {', '.join(sorted(actual, key=LAYER.get))}."
        assert {*re.split(r",\s+", match[1])} == actual, sorted(actual, key=LAYER.get)


@pytest.mark.parametrize("call", OWNERS)
def test_a_delicate_call_is_made_in_one_module(call):
    assert [str(path.relative_to(ROOT)) for path in FILES if call in path.read_text()] == [
        OWNERS[call]
    ]


def test_functions_accept_what_they_use_of_a_run():
    importers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if "trainer.training.run" in find_imports(path)
    }
    assert importers == WHOLE_RUN


def test_class_names_are_unique():
    bodies = {path: parse(path).body for path in FILES}
    named = [
        (node.name, path)
        for path, body in bodies.items()
        for node in body
        if isinstance(node, ast.ClassDef)
    ]
    homes = dict(named)
    assert [(name, path) for name, path in named if homes[name] != path] == []


@pytest.mark.parametrize(
    "path", [path for path in FILES if package_of(path) != "__main__"], ids=lambda path: path.name
)
def test_no_module_imports_the_package_itself(path):
    """Packages import from lower layers; `trainer` itself is the public API above all of them."""
    names = [
        alias.name
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    froms = [
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module == "trainer"
    ]
    assert "trainer" not in names
    assert {alias.name for node in froms for alias in node.names} <= LAYER.keys()


def test_modules_lie_in_packages():
    alone = {"__init__.py", "__main__.py", "errors.py", "versions.py"}
    assert {path.name for path in ROOT.glob("*.py")} == alone


def test_contributing_draws_the_packages():
    page = (PROJECT / ".github" / "CONTRIBUTING.md").read_text()
    for part in (draw(), table()):
        assert part in page, f"python -m tests.layers prints:\n{part}"

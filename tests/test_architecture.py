"""Imports go one way: a module imports only from the rooms to its left."""

import ast
from pathlib import Path

import pytest

import trainer

ROOMS = [
    {"errors", "faults"},
    {"files"},
    {"recipe", "words"},
    {"checks"},
    {"world", "topology", "devices", "cards", "peers"},
    {"family"},
    {"interrupts", "fork_server", "preload"},
    {"data", "checkpoint", "metrics", "precision", "randomness", "run_folder", "graphs", "partition", "balance"},
    {"plots", "pool"},
    {"models", "events", "tracking", "launching"},
    {"strategies"},
    {"evaluation", "optimization", "timeline", "verdict"},
    {"run"},
    {"reporting", "resuming", "speed_test", "diagnosis"},
    {"meeting"},
    {"training"},
    {"planning", "inference", "doctor"},
    {"comparison"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
HOME = Path(trainer.__file__).parent
FILES = sorted(HOME.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trainer":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("trainer.")]
        yield from names


@pytest.mark.parametrize(
    "path", [path for path in FILES if path != HOME / "__init__.py"], ids=lambda p: str(p.relative_to(HOME))
)
def test_imports_go_one_way(path):
    assert room(path) in LEVEL, f"{path.name} has no place in the order above"
    for name in imported(path):
        if name not in LEVEL or name == room(path):
            continue
        assert LEVEL[name] <= LEVEL[room(path)], f"{room(path)} imports {name}, which is to its right"


def test_no_import_cycles():
    graph = {
        name: {n for path in FILES if room(path) == name for n in imported(path) if n in LEVEL and n != name}
        for name in LEVEL
    }

    def reaches(start: str, goal: str, seen: frozenset[str]) -> bool:
        return any(n == goal or (n not in seen and reaches(n, goal, seen | {n})) for n in graph[start])

    assert [name for name in graph if reaches(name, name, frozenset({name}))] == []

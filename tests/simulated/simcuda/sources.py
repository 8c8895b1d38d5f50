"""Places in the project's source, found in its syntax trees, to change a line.

A changed function takes the place of the one that is loaded: its code object is swapped, so whoever
holds the function (a decorator, a class, another module) runs the changed one. Nothing on disk
changes.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tests.simulated.simcuda.waits import HOME

ORDERING = {"wait_stream", "wait_event", "record_stream", "record_event", "record"}
ORDERING |= {"synchronize", "synchronise", "query"}


class Site(NamedTuple):
    """A place in trainer/."""

    file: str
    function: str
    line: int
    column: int
    text: str

    @property
    def name(self) -> str:
        """Name that does not depend on line numbers."""
        return f"{self.file} {self.function}: {self.text}"


@functools.cache
def files() -> dict[str, str]:
    return {
        str(path.relative_to(HOME)): path.read_text() for path in sorted(Path(HOME).rglob("*.py"))
    }


def walk(file: str) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield each node with the qualified name of its function, and its parent."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(files()[file]), "")]
    while waiting:
        node, scope = waiting.pop()
        for child in ast.iter_child_nodes(node):
            yield child, scope.removesuffix(".<locals>"), node
            inner = scope
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = f"{scope}.{child.name}".removeprefix(".")
                inner += ".<locals>" if isinstance(child, ast.FunctionDef) else ""
            waiting.append((child, inner))


def site(file: str, function: str, node: Any) -> Site:
    return Site(file, function, node.lineno, node.col_offset, ast.unparse(node))


# Lines that order work.


@functools.cache
def ordering() -> list[Site]:
    """List the calls in trainer/ that make someone wait, or for which others wait."""
    collected = []
    for file, text in files().items():
        for node, function, parent in walk(file) if re.search("|".join(ORDERING), text) else ():
            if (
                isinstance(node, ast.Call)
                and _orders(node)
                and isinstance(parent, ast.Expr | ast.Assign | ast.BoolOp)
            ):
                collected.append(site(file, function, node))
    return sorted(collected)


def _orders(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        # Records no event.
        of_steps = re.search(
            r"(recorder(\.get_recorder\(.*\))?|steps)$", ast.unparse(call.func.value)
        )
        return call.func.attr in ORDERING and not of_steps
    return isinstance(call.func, ast.Name) and call.func.id in ORDERING


class _Without(ast.NodeTransformer):
    """Remove a wait; an event is never recorded, or always complete."""

    def __init__(self, place: Site) -> None:
        self.place = place
        self.done = False

    def visit_Call(self, node: ast.Call) -> Any:
        if (node.lineno, node.col_offset, ast.unparse(node)) != (
            self.place.line,
            self.place.column,
            self.place.text,
        ):
            return self.generic_visit(node)
        self.done = True
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        instead = {"record_event": "__import__('torch').cuda.Event()", "query": "True"}.get(
            name, "None"
        )
        return ast.copy_location(ast.parse(instead, mode="eval").body, node)


@contextmanager
def without(place: Site) -> Iterator[None]:
    """The project as if a call were not there."""
    change = _Without(place)
    tree = ast.fix_missing_locations(change.visit(ast.parse(files()[place.file])))
    assert change.done, place
    with _swapped(place.file, tree):
        yield


# Code objects.


@contextmanager
def _swapped(file: str, tree: ast.Module) -> Iterator[None]:
    """Loaded functions of a file run the code of another syntax tree."""
    put_back: list[Callable[[], None]] = []
    loaded = _functions(
        frozenset(name for name in sys.modules if name.partition(".")[0] == "trainer")
    )
    try:
        new = {
            _name(code): code
            for code in _codes(compile(tree, HOME + file, "exec", dont_inherit=True))
        }
        for function in loaded.get(file, []):
            code = new.get(_name(function.__code__))
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                put_back.append(functools.partial(setattr, function, "__code__", function.__code__))
                function.__code__ = code
        yield
    finally:
        for undo in put_back:
            undo()


def _name(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


@functools.cache
def _functions(modules: frozenset[str]) -> dict[str, list[FunctionType]]:
    """Return all functions of the loaded modules, by file.

    The search among millions of objects runs once.
    """
    collected: dict[str, list[FunctionType]] = {}
    gc.unfreeze()  # The process that forked this one had frozen them.
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(HOME):
            collected.setdefault(thing.__code__.co_filename.removeprefix(HOME), []).append(thing)
    gc.freeze()
    return collected

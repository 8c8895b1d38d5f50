"""What users' own decorators make known by a name: models, data sets, tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from trainer.errors import RecipeError

Kept = TypeVar("Kept")


class Registry(dict[str, Kept]):
    """Names, and what each means."""

    def __init__(
        self, function: str, shipped: Mapping[str, Kept] | None = None, taken: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`function` is the decorator's name; `taken` gives names that mean something else."""
        super().__init__(shipped or {})
        self._function, self._taken = function, taken

    def register(self, name: str) -> Callable[[Any], Any]:
        """The decorator that keeps what it is given under this name.

        Raises:
            RecipeError: the name is taken, or no text, as where the brackets were forgotten.
        """
        if not isinstance(name, str):
            called, function = getattr(name, "__name__", "name"), self._function
            raise RecipeError(f"{function} is given a name: write @{function}({called!r}), not {type(name).__name__}")
        if name in self or name in self._taken():
            raise RecipeError(f"{self._function}('{name}'): the name is taken; choose another")

        def keep(value: Kept) -> Kept:
            self[name] = value
            return value

        return keep

    @contextmanager
    def lent(self, name: str, value: Kept) -> Iterator[None]:
        """Within this block the name means this, whatever else it means."""
        before = self.get(name)
        self[name] = value
        try:
            yield
        finally:
            if before is None:
                del self[name]
            else:
                self[name] = before

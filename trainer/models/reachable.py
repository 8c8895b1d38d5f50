"""Find, compare and restore the host state that a model's code can reach.

A user's model may count its passes in attributes of modules, but also in objects of any class,
closures, default arguments, class attributes, globals and iterators. A walk over all objects that
the code can reach finds this state.

Two simpler designs fail. A deep copy of a model shares the closures, class attributes and globals
of the original. A forked child process cannot use CUDA or gloo, and cannot run a backward pass if
its parent has run one.
"""

import array
import ast
import contextvars
import ctypes
import dis
import functools
import gc
import itertools
import math
import operator
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# The walk does not visit the entries of a container that has more entries than this, because large
# containers usually hold data.
MAX_ENTRIES = 1000
# Maximum number of values that the walk visits. Values that are closest to the model come first.
MAX_VALUES = 50_000
# Packages that are not visited: they keep no state for a model, and a walk through their objects
# would reach the whole program.
LIBRARIES = {
    "torch",
    "torchvision",
    "timm",
    "trainer",
    "numpy",
    "PIL",
    "pandas",
    "logging",
    "threading",
    "weakref",
}
NUMBERS = (
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    Decimal,
    Fraction,
    types.NoneType,
    torch.dtype,
    torch.device,
)
CONTAINERS = (OrderedDict, dict, list, deque, set, bytearray, array.array, tuple, frozenset)
# Attributes that `vars` does not list, by the type of the object.
PARTS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__closure__"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    types.GeneratorType: ("gi_frame",),
    types.FrameType: ("f_lasti",),
    functools.partial: ("func", "args", "keywords"),
    memoryview: ("obj",),
    weakref.WeakKeyDictionary: ("data",),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    Tensor: ("_backward_hooks", "_post_accumulate_grad_hooks"),
    nn.Parameter: ("_backward_hooks", "_post_accumulate_grad_hooks"),
}
# Names of the dictionaries in which `nn.Module` registers children, buffers and hooks. The
# dictionary of parameters is left out, because FSDP replaces parameters and keeps references to the
# replacements.
FIELDS = vars(nn.Module())
REGISTERED = [key for key, value in FIELDS.items() if isinstance(value, dict)]
REGISTERED.remove("_parameters")
OF_MODULES = {*FIELDS, "_compiled_call_impl"}
GLOBAL_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "IMPORT_NAME")
CACHED = functools._lru_cache_wrapper
Entries = dict[Any, Any]


class Reachable:
    """Snapshot of the values that the code of `modules` can reach.

    Attributes:
        values: Pairs (name for messages, value). A value that can be reached in several ways is
            listed under each name. Numbers, strings, and the parameters and buffers that are
            registered in `modules` are left out.
        plain: Values that can be compared with those of a later snapshot, by name for messages.
            These are the results of `_plain`, such as numbers and lengths of containers. If
            `_plain` returns None for an object that the walk has reached before, the value is the
            first name of that object.
        is_complete: False if the walk ended at `MAX_VALUES` values.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.values: list[tuple[str, Any]] = []
        self.plain: dict[str, object] = {}
        self._holders: list[tuple[Holder, Entries]] = []
        # (iterator, position, copy) of each visited iterator.
        self._iterators: list[tuple[Any, object, Any]] = []
        registered = set[int]()
        for module in modules:
            registered.update(map(id, module.parameters()))
            registered.update(map(id, module.buffers()))
        # The references keep the values alive, so that no new object can get the same id.
        seen: dict[int, tuple[str, Any]] = {}
        waiting = deque[tuple[str, Any]](("", module) for module in modules)
        while waiting and len(seen) < MAX_VALUES:
            name, value = waiting.popleft()
            plain = _plain(value)
            if plain is not None and not name.endswith(("attribute training", ".training")):
                self.plain[name] = plain
            if isinstance(value, NUMBERS):
                continue
            if id(value) not in registered:
                self.values.append((name, value))
            if id(value) in seen:
                # Record which object it is, because an attribute may select one of several known
                # objects, such as a training phase.
                self.plain.setdefault(name, f"the {seen[id(value)][0]}")
                continue
            seen[id(value)] = name, value
            if _is_iterator(value):
                self._iterators.append((value, plain, _duplicate(value)))
            for holder in _iterate_holders(name, value):
                entries = holder.read()
                self._holders.append((holder, entries))
                if len(entries) <= MAX_ENTRIES:
                    for number, (key, entry) in enumerate(entries.items()):
                        waiting.append((holder.label(number, key), entry))
            kind: Any = type(value)
            for base in _describe_class(kind)[1]:
                waiting.append((f"class attribute {base.__qualname__}", base))
        self.is_complete = not waiting

    def restore(self) -> None:
        """Restore the entries of all visited values.

        An `itertools.count` that has moved is replaced by its copy. Other iterators are not moved
        back, so `restore_after` raises an error for them.
        """
        replacements = {
            id(value): duplicate
            for value, position, duplicate in self._iterators
            if _plain(value) != position
        }
        for holder, entries in self._holders:
            before = entries
            if replacements:
                before = {key: replacements.get(id(entry), entry) for key, entry in entries.items()}
            now = holder.read()
            # Keys must be equal and in the same order, and values must be the same objects.
            if [*now] != [*before] or not all(map(operator.is_, now.values(), before.values())):
                holder.write(before)


def _plain(value: Any) -> object:
    """Return a plain value that changes when `value` does, or None for other kinds of objects.

    The result is a number, a string, a length (with the keys of a dictionary), the name of a class
    or function, or the position of an iterator.
    """
    if isinstance(value, NUMBERS):
        if isinstance(value, float | np.floating):
            return "nan" if math.isnan(value) else float(value)
        # This calls the method of Python's own class, because the method of a user's subclass may
        # have side effects.
        number: Any = next(kind for kind in NUMBERS if isinstance(value, kind))
        return str(number.__repr__(value))
    kind: Any = type(value)
    base = _describe_class(kind)[0]
    if base is not None:
        length = base.__len__(value)
        if not issubclass(base, dict):
            return length
        first_keys = itertools.islice(base.keys(value), MAX_ENTRIES)
        return length, [key for key in first_keys if type(key) in (int, str)]
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    return _position(value) if _is_iterator(value) else None


def find_doubts(model: nn.Module) -> list[str]:
    """Return warnings about layers that a model does not register, and about an incomplete walk.

    Libraries register all their layers, so a model without classes of the user is not visited.
    """
    if not any(is_own(type(part)) for part in model.modules()):
        return []
    doubts = []
    reachable = Reachable([model])
    registered = set(map(id, model.modules()))
    registered.update(map(id, model.parameters()))
    for name, value in reachable.values:
        if id(value) in registered or not isinstance(value, nn.Module | nn.Parameter):
            continue
        is_stateful = False
        parameters: list[nn.Parameter]
        if isinstance(value, nn.Module):
            parameters = [*value.parameters()]
            is_stateful = not parameters and next(value.buffers(), None) is not None
        else:
            parameters = [value]
        # An unregistered frozen teacher is not a mistake: it is not trained.
        if is_stateful or any(p.requires_grad and id(p) not in registered for p in parameters):
            doubts.append(
                f"the {type(value).__name__} in {name} is not registered, so it is not trained, "
                "saved or moved to a device: keep it in nn.ModuleList, nn.ModuleDict or "
                "nn.ParameterList"
            )
            break
    if not reachable.is_complete:
        doubts.append(
            f"its code reaches more than {MAX_VALUES} objects, so the state of the farthest is "
            "neither compared nor restored after a probe: keep data out of the model"
        )
    return doubts


# --- iterators


def _is_iterator(value: Any) -> bool:
    return type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__")


def _position(iterator: Any) -> object:
    """Return the position of an iterator.

    If the position cannot be read, the result is a new object, so that the iterator counts as
    moved.
    """
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if isinstance(iterator, types.GeneratorType):
        # The frame of the generator is compared as one of its entries.
        return None
    # Iterators of itertools cannot be reduced in Python 3.14 and later.
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        return _outline(iterator.__reduce__())
    return object()


def _outline(part: Any) -> object:
    """Return a comparable form of `part`, a value in the result of an iterator's `__reduce__`."""
    if isinstance(part, tuple):
        return tuple(map(_outline, part))
    if isinstance(part, list | dict | set):
        return len(part)
    if _is_iterator(part):
        return _position(part)
    return part if isinstance(part, int | str) else id(part)


def _duplicate(iterator: Any) -> Any:
    """Return a copy of an `itertools.count`, or the iterator itself if it is of another type."""
    # If a counter counts objects other than numbers, its `repr` cannot be parsed.
    with suppress(ValueError):
        # Python 3.14 and later cannot copy iterators of itertools, so the `repr` is parsed.
        if isinstance(iterator, itertools.count):
            arguments = repr(iterator).removeprefix("count")[:-1] + ",)"
            return itertools.count(*ast.literal_eval(arguments))
    return iterator


# --- holders


@dataclass(eq=False)
class Holder:
    """Readable and writable attributes of a value.

    Attributes:
        prefix: Start of the attributes' names in messages.
        value: The object that has the attributes.
        names: Names of the attributes. If None, these are all attributes that `vars` lists, except
            names with two leading underscores and the fields of `nn.Module`.
    """

    prefix: str
    value: Any
    names: Any = None

    def label(self, number: int, key: Any) -> str:
        """Return the name of an entry in messages."""
        return f"{self.prefix}{key}"

    def read(self) -> Entries:
        """Return the current entries."""
        entries = {}
        if self.names is None:
            for key, entry in vars(self.value).items():
                if key[:2] != "__" and key not in OF_MODULES:
                    entries[key] = entry
            return entries
        for name in self.names:
            # A slot or a cell may be empty. Then there is no entry for it.
            with suppress(AttributeError, ValueError):
                entries[name] = getattr(self.value, name)
        # A generator keeps its variables in its frame.
        if isinstance(self.value, types.FrameType):
            entries |= dict(self.value.f_locals)
        return entries

    def write(self, entries: Entries) -> None:
        """Restore the entries that `read` returned before."""
        # The user's class may override `__setattr__`, so Python's own method is called.
        owner = type if isinstance(self.value, type) else object
        # The attributes of these objects are stored in C++ or per thread, where only the methods of
        # their own classes can write them.
        if isinstance(self.value, torch.jit.ScriptModule | threading.local):
            owner = type(self.value)
        now = self.read()
        for key in now.keys() | entries.keys():
            # Some attributes are read-only, so they are left as they are.
            with suppress(AttributeError, TypeError):
                if key not in entries:
                    owner.__delattr__(self.value, key)
                elif now.get(key, now) is not entries[key]:
                    owner.__setattr__(self.value, key, entries[key])


class Items(Holder):
    """Items of a container.

    `names` is the built-in base class of the container. Its methods read and write the items,
    because a user's subclass may override them.
    """

    def read(self) -> Entries:
        if issubclass(self.names, dict):
            return dict(self.names.items(self.value))
        return dict(enumerate(self.names.__iter__(self.value)))

    def write(self, entries: Entries) -> None:
        base = self.names
        value = self.value
        if base in (tuple, frozenset):
            return
        # A bytearray cannot be resized while a memoryview refers to it, so its bytes are
        # overwritten instead of cleared and added again.
        if base is bytearray:
            base.__setitem__(value, slice(None), bytes(entries.values()))
            return
        if base is array.array:
            del value[:]
        else:
            base.clear(value)
        if issubclass(base, dict):
            for key, entry in entries.items():
                base.__setitem__(value, key, entry)
        else:
            fill = base.update if base is set else base.extend
            fill(value, entries.values())

    def label(self, number: int, key: Any) -> str:
        return f"{self.prefix}[{number}]"


class Variable(Holder):
    """Value of a context variable."""

    def read(self) -> Entries:
        # A variable that has no default and was never set has no entry.
        with suppress(LookupError):
            return {"value": self.value.get()}
        return {}

    def write(self, entries: Entries) -> None:
        for entry in entries.values():
            self.value.set(entry)


class Cache(Holder):
    """Arguments and results in the cache of `functools.lru_cache`."""

    def read(self) -> Entries:
        return {
            id(part): part
            for part in gc.get_referents(self.value)
            if not callable(part) and (type(part) is not dict or not _has_links(part))
        }

    def write(self, entries: Entries) -> None:
        # A cache of limited size can only be cleared as a whole. Its results are computed again
        # when they are needed.
        if self.read().keys() - entries.keys():
            self.value.cache_clear()

    def label(self, number: int, key: Any) -> str:
        return f"cache of {self.prefix}{key}"


def _has_links(results: Entries) -> bool:
    """Return whether a dictionary is the index of an `lru_cache` of limited size.

    Only C code may change the entries of such a dictionary, so it is not visited.
    """
    first = next(iter(results.values()), None)
    return type(first).__name__ == "_lru_list_elem"


class Registered(Holder):
    """Children, buffers and hooks of a module."""

    def read(self) -> Entries:
        fields = vars(self.value)
        entries = {}
        for registry in REGISTERED:
            for key, entry in fields[registry].items():
                entries[registry, key] = entry
        return entries

    def write(self, entries: Entries) -> None:
        for registry in REGISTERED:
            vars(self.value)[registry].clear()
        for (registry, key), entry in entries.items():
            vars(self.value)[registry][key] = entry

    def label(self, number: int, key: Any) -> str:
        registry, name = key
        return self.prefix + (name if registry == "_modules" else f"{registry}[{name}]")


class Scope:
    """Object whose attributes are variables of a Python module, so that a `Holder` reads them."""

    def __init__(self, variables: Entries) -> None:
        self.__dict__ = variables


@functools.lru_cache(10_000)
def _describe_class(kind: Any) -> tuple[Any, list[type], list[str]]:
    """Describe a class, to visit its instances.

    Returns:
        (container, own, attributes): `container` is the built-in container class that `kind`
        derives from, or None. `own` lists those classes among `kind` and its base classes that
        belong to the user. `attributes` has the names of the attributes of an instance that `vars`
        does not list.
    """
    container = next((base for base in CONTAINERS if issubclass(kind, base)), None)
    own = list(filter(is_own, kind.__mro__))
    attributes = []
    for base in own:
        for key, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                attributes.append(key)
    return container, own, [*attributes, *PARTS.get(kind, ())]


def _package_of(code: Any) -> str:
    # The `__module__` of a compiled class need not be a string.
    return str(getattr(code, "__module__", None) or code.__name__).partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package is installed in site-packages.

    The walk does not visit functions, classes and modules of such a package, because they would
    lead to tens of thousands of values.
    """
    file = Path(getattr(sys.modules.get(package), "__file__", None) or "")
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def is_own(code: Any) -> bool:
    """Return whether code is neither from `LIBRARIES` nor from Python's standard library.

    Other installed packages count as the user's own; `_is_installed` recognizes them.

    Args:
        code: A class, function or module.
    """
    root = _package_of(code)
    return root not in LIBRARIES and root not in sys.stdlib_module_names and root != "builtins"


def _iterate_holders(name: str, value: Any) -> Iterator[Holder]:
    """Yield the holders of a value. A value may have items, attributes and slots."""
    # Functions, classes and modules of libraries and of this project are skipped, because they may
    # refer to objects that do not belong to the model. A hook that counts calls in a probe refers
    # to its counter, for example.
    is_code = isinstance(value, types.FunctionType | types.ModuleType | type | CACHED)
    if is_code and (not is_own(value) or _is_installed(_package_of(value))):
        return
    kind: Any = type(value)
    container, _, attributes = _describe_class(kind)
    prefix = f"{name}." if name else "attribute "
    if container is not None:
        yield Items(name, value, container)
    if attributes:
        yield Holder(prefix, value, attributes)
    if kind is contextvars.ContextVar:
        yield Variable(prefix, value)
    if kind is CACHED:
        yield Cache(prefix, value)
    if isinstance(value, ctypes._SimpleCData):
        yield Holder(prefix, value, ["value"])
    # `vars` does not list the attributes of a scripted module, so torch's methods list them.
    if isinstance(value, torch.jit.ScriptModule):
        scripted = [*value._concrete_type.get_attributes(), *value._modules.keys()]
        yield Holder(prefix, value, scripted)
    elif isinstance(value, nn.Module):
        yield Holder(prefix, value)
        yield Holder(prefix, value, ["training"])
        yield Registered(prefix, value)
        for key, parameter in value._parameters.items():
            if parameter is not None:
                yield Holder(f"{prefix}{key}.", parameter, PARTS[Tensor])
            if type(parameter) is nn.Parameter:
                yield Holder(f"{prefix}{key}.", parameter)
    elif _package_of(kind) not in LIBRARIES and hasattr(value, "__dict__"):
        yield Holder(prefix, value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        # The list is a copy. The array itself is restored by `undisturbed`.
        yield Items(name, value.reshape(-1).tolist(), list)
    if kind is types.FunctionType:
        used = _list_globals(value.__code__)
        yield Holder("global ", Scope(value.__globals__), used)
        # A function may import modules. The dictionary is a copy, so that restoring it does not
        # undo an import.
        imported = {key: sys.modules[key] for key in used if key in sys.modules}
        yield Holder("module ", Scope(imported), used)


@functools.lru_cache(10_000)
def _list_globals(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals in the code of a function and of its nested functions."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in GLOBAL_NAMES
    }
    # Code may index the dictionaries `globals()`, `sys.modules` and `vars()` by string constants.
    # These constants count as names.
    has_dictionary = not names.isdisjoint(("globals", "sys", "vars"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _list_globals(constant)
        elif has_dictionary and isinstance(constant, str):
            names.add(constant)
    return frozenset(names)

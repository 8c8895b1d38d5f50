"""Where only one tensor is live in a model's graph, so that it can be cut there."""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from trainer.models.graphs import BY_MODE, INPLACE, attribute

_SEVERAL = {"chunk", "split", "tensor_split", "unbind", "size", "shape"}
_FRESH: set[Any] = {torch.add, torch.mul, torch.matmul, torch.cat}
_FRESH |= {operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul}


@dataclass(frozen=True)
class CutPoint:
    """Between two operations, where only one value is live."""

    end: int  # index of the last node before it
    value: fx.Node
    usable: bool  # the value is a tensor, and no later operation changes it in place


def cut_points(nodes: Sequence[fx.Node], model: nn.Module) -> list[list[CutPoint]]:
    """The points of a graph where it can be cut, in order, grouped by the parameters before them.

    Without points with no parameter before or after them, and those with a tensor of the state dict used on both sides.
    Reading an attribute keeps nothing live: every stage that uses it reads it.
    """
    position = {node: i for i, node in enumerate(nodes)}
    last = {node: max((position[user] for user in node.users), default=-1) for node in nodes}
    spans = _spans(nodes, model)
    used = [spans[id(p)] for p in model.parameters() if id(p) in spans]
    groups: defaultdict[int, list[CutPoint]] = defaultdict(list)
    live: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        live = {value for value in live | {node} if last[value] > i and value.op != "get_attr"}
        before = sum(first <= i for first, _ in used)
        if len(live) == 1 and 0 < before < len(used) and not any(a <= i < b for a, b in spans.values()):
            (value,) = live
            usable = not _several(value) and not _changed(value, i, position, model)
            groups[before].append(CutPoint(i, value, usable))
    return list(groups.values())


def _spans(nodes: Sequence[fx.Node], model: nn.Module) -> dict[int, tuple[int, int]]:
    """By id, each tensor of the state dict that is used: the first and the last node that uses it."""
    saved = model.state_dict(keep_vars=True)
    known = {id(tensor) for tensor in saved.values()}
    spans: dict[int, tuple[int, int]] = {}
    for i, node in enumerate(nodes):
        used = [
            saved[str(read.target)] for read in node.all_input_nodes if read.op == "get_attr" and read.target in saved
        ]
        if node.op == "call_module" and node.target != BY_MODE:
            module = attribute(model, node.target)
            used += [*module.parameters(), *module.buffers()]
        for tensor in used:
            if id(tensor) in known:
                spans[id(tensor)] = (spans.get(id(tensor), (i, i))[0], i)
    return spans


def _several(value: fx.Node) -> bool:
    """Whether a value is a tuple or a shape, as far as the graph shows."""
    name = value.args[1] if value.target is getattr else getattr(value.target, "__name__", value.target)
    return name in _SEVERAL or any(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in value.users
    )


def _changed(value: fx.Node, end: int, position: Mapping[fx.Node, int], model: nn.Module) -> bool:
    """Whether an operation after node `end` changes a value in place, directly or through a possible view.

    Autograd forbids that for a received tensor, a leaf that requires grad; and in one process it shares its memory with
    the sender's.
    """
    views = [value]
    for view in views:
        for user in view.users:
            if position[user] > end and _written(user, model) is view:
                return True
            if position[user] > end and not _is_fresh(user, model) and user not in views:
                views.append(user)
    return False


def _written(node: fx.Node, model: nn.Module) -> object:
    """The value that an operation changes in place, if any."""
    if node.op == "call_module":
        inplace = node.target != BY_MODE and getattr(attribute(model, node.target), "inplace", False)
    elif node.op == "call_method":
        inplace = _is_inplace_name(str(node.target))
    elif node.op == "call_function":
        inplace = node.target in INPLACE or _is_inplace_name(getattr(node.target, "__name__", ""))
        inplace = inplace or _argument(node, "inplace")
    else:
        return None
    return (*node.args, *node.kwargs.values())[0] if inplace else None


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of a Python function that is called with it by name or by position, else None."""
    assert callable(node.target)
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get(name)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _is_fresh(node: fx.Node, model: nn.Module) -> bool:
    """Whether a result is certainly not a view of an argument: sums, products, and layers with parameters."""
    if node.op == "call_module" and node.target != BY_MODE:
        return any(True for _ in attribute(model, node.target).parameters())
    return node.target in _FRESH or node.target in INPLACE

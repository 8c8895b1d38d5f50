"""From a model's graph to its cuts, and to stages that keep parameter names.

A model can be cut where exactly one tensor is live. `torch.fx` records its operations (Reed et al., arXiv:2112.08429);
a stage is the operations between two cuts, with the model's parameters and buffers under the model's names.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainer import recipe as recipes
from trainer.errors import RecipeError
from trainer.models.graphs import BY_MODE, INPLACE, ByMode, Recording, Tracer, Untraceable, attribute, record

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


class Traced:
    """A model as a sequence of blocks.

    Attributes:
        cuts: the usable cuts in order, each named after the innermost module whose output is sent ("layer3.2": a stage
            ends after that block) or, where that is no module's output, after an operation of the graph ("add_3"). Of
            places without parameters between them only the last is a cut, so that each stage has something to train.
        named: every name a user may give -> its cut: also outer modules that end there ("layer3"), and places before
            a cut with only operations without parameters between ("layer4" -> "flatten").
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self._model = model
        self._constants = recording.constants
        self._nodes = list(recording.graph.nodes)
        self._ends: list[tuple[int, fx.Node]] = []  # of each cut: the last node before it, the value that is sent
        self.named: dict[str, str] = {}
        cuts: list[str] = []
        for group in cut_points(self._nodes, model):
            usable = [place for place in group if place.usable]
            if usable:
                cuts.append(recording.names(usable[-1].value)[0])
                self._ends.append((usable[-1].end, usable[-1].value))
                self.named |= {name: cuts[-1] for place in group for name in recording.names(place.value)}
        self.cuts = tuple(cuts)

    def stages(self, cuts: Sequence[str]) -> list[fx.GraphModule]:
        """The model as `len(cuts)` + 1 modules, each of which takes the output of the one before, a tensor.

        Parameters and buffers are the model's own (move them with `stage.to`), and the stages' state dicts together are
        the model's. Unused ones belong to the last stage. Modules without parameters may be in several stages, and then
        share their training flag.

        Raises:
            RecipeError: as `choose`.
        """
        ends = [self._ends[self.cuts.index(cut)] for cut in choose(self, cuts, len(cuts) + 1)]
        ends.append((len(self._nodes) - 1, self._nodes[-1].args[0]))
        stages, start, received = [], 0, self._nodes[0]
        for end, sent in ends:
            stages.append(self._stage(self._nodes[start : end + 1], received, sent))
            start, received = end + 1, sent
        held = {name for stage in stages for name, _ in _tensors(stage)}
        for name, tensor in _tensors(self._model):
            if name not in held:  # unused, or another name of a tied one
                owners = (stage for stage in stages if any(other is tensor for _, other in _tensors(stage)))
                _put(next(owners, stages[-1]), name, tensor)
        saved = self._model.state_dict().keys()
        for stage in stages:
            for name, _ in stage.named_buffers(remove_duplicate=False):
                if name not in saved:
                    owner, _, field = name.rpartition(".")
                    stage.get_submodule(owner)._non_persistent_buffers_set.add(field)
        return stages

    def _stage(self, nodes: Sequence[fx.Node], received: fx.Node, sent: fx.Node) -> fx.GraphModule:
        graph = fx.Graph(tracer_cls=Tracer)
        copies = {received: graph.placeholder(received.name)}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # an attribute: every stage that uses it reads it, wherever it was read first
                assert node.op == "get_attr"
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                copies[node] = graph.node_copy(node, copied)
        graph.output(copies[sent])
        targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
        stage = fx.GraphModule({target: self._attribute(target) for target in targets}, graph)
        stage.training = self._model.training
        return stage

    def _attribute(self, target: str) -> Any:
        if target == BY_MODE:
            return ByMode().train(self._model.training)
        return self._constants[target] if target in self._constants else attribute(self._model, target)


def trace(model: nn.Module, name: str = "") -> Traced:
    """Record the model's operations, in training and in evaluation mode, and find where it can be cut.

    `name` is the recipe's, for messages. Raises RecipeError where its forward cannot be recorded.
    """
    try:
        return Traced(model, record(model))
    except Untraceable as error:
        raise RecipeError(
            f"model.name={name or type(model).__name__} cannot be cut into stages: {error}; use mode=ddp, "
            "or write its forward as a straight line of operations on one tensor"
        ) from error


def choose(traced: Traced, wanted: Sequence[str], stages: int) -> tuple[str, ...]:
    """The cuts of a user's `pipeline.cuts=[...]`.

    Raises:
        RecipeError: a name that is no cut (with the nearest, and the list), one too many or too few, or a wrong order.
    """
    given = f"pipeline.cuts=[{', '.join(wanted)}]"
    for name in wanted:
        if name not in traced.named:
            guess = recipes.nearest(name, traced.named)
            hint = f"did you mean {guess}? There are" if guess else "there are"
            raise RecipeError(f"{given}: {name} is not a usable cut; {hint}: {', '.join(traced.cuts) or 'none'}")
    if len(wanted) != stages - 1:
        raise RecipeError(f"{given} has {len(wanted)} names and {stages} stages need {stages - 1}")
    chosen = tuple(traced.named[name] for name in wanted)
    for i, cut in enumerate(chosen):
        if cut in chosen[:i]:
            raise RecipeError(f"{given}: {wanted[chosen.index(cut)]} and {wanted[i]} mean the same cut, {cut}")
    ordered = sorted(chosen, key=traced.cuts.index)
    if list(chosen) != ordered:
        raise RecipeError(f"{given} is not in the model's order; use pipeline.cuts=[{','.join(ordered)}]")
    return chosen


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or buffer under a dotted name, in empty modules where there are none yet."""
    *path, field = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(field, tensor)
    else:
        module.register_buffer(field, tensor)

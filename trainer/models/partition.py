"""Cut a model into stages.

A model can be cut where exactly one tensor is live, which means that it was computed before the cut
and is used after it. `torch.fx` records the model's operations (Reed et al., arXiv:2112.08429). A
stage consists of the operations between two cuts. Its parameters and buffers have the same names as
in the model.
"""

import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainer import recipe as recipes
from trainer.errors import RecipeError
from trainer.models.graphs import (
    BY_MODE,
    INPLACE,
    ByMode,
    Tracer,
    Untraceable,
    attribute,
    record,
)
from trainer.models.shapes import iterate_tensors

# Names of operations that return a tuple or a shape, which a stage cannot send to the next one.
_SEVERAL = {"chunk", "split", "tensor_split", "unbind", "size", "shape"}
# Operations whose result is never a view of an argument, so that a later change of the result in
# place does not change the argument.
_FRESH: set[Any] = {torch.add, torch.mul, torch.matmul, torch.cat}
_FRESH |= {operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul}


@dataclass(frozen=True)
class CutPoint:
    """Point between two operations where only one value is live.

    Attributes:
        end: Index of the last node before the point.
        value: The live value.
        usable: Whether the value is a tensor that no later operation changes in place.
    """

    end: int
    value: fx.Node
    usable: bool


def cut_points(
    nodes: Sequence[fx.Node],
    model: nn.Module,
) -> list[list[CutPoint]]:
    """List the points where a graph can be cut, grouped by the number of parameters before them.

    A point is left out if no parameter is used before it or none after it, or if a tensor of the
    state dict is used on both sides. An attribute of the model does not count as live, because each
    stage that uses the attribute reads it from the model.
    """
    position = {node: index for index, node in enumerate(nodes)}
    last_use = dict.fromkeys(nodes, -1)
    for index, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last_use[read] = index
    spans = _find_spans(nodes, model)
    parameters = map(id, model.parameters())
    first_uses = [spans[key][0] for key in parameters if key in spans]
    groups = defaultdict(list)
    live = set()
    for index, node in enumerate(nodes):
        if node.op != "get_attr":
            live.add(node)
        live = {value for value in live if last_use[value] > index}
        parameters_before = sum(first <= index for first in first_uses)
        if len(live) != 1 or not 0 < parameters_before < len(first_uses):
            continue
        if any(first <= index < last for first, last in spans.values()):
            continue
        (value,) = live
        usable = not _is_several(value) and not _is_changed(value, index, position, model)
        groups[parameters_before].append(CutPoint(index, value, usable))
    return list(groups.values())


def _find_spans(
    nodes: Sequence[fx.Node],
    model: nn.Module,
) -> dict[int, tuple[int, int]]:
    """Return the indices of the first and last node that use a tensor of the state dict, by id."""
    saved = model.state_dict(keep_vars=True)
    saved_ids = set(map(id, saved.values()))
    spans: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        used = [
            saved[str(read.target)]
            for read in node.all_input_nodes
            if read.op == "get_attr" and read.target in saved
        ]
        if node.op == "call_module" and node.target != BY_MODE:
            module = attribute(model, node.target)
            used += [*module.parameters(), *module.buffers()]
        for key in map(id, used):
            if key in saved_ids:
                first, _ = spans.get(key, (index, index))
                spans[key] = first, index
    return spans


def _is_several(value: fx.Node) -> bool:
    """Return whether the graph shows that a value is a tuple or a shape."""
    name = getattr(value.target, "__name__", value.target)
    if value.target is getattr:
        name = value.args[1]
    return name in _SEVERAL or any(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in value.users
    )


def _is_changed(
    value: fx.Node,
    end: int,
    position: Mapping[fx.Node, int],
    model: nn.Module,
) -> bool:
    """Return whether an operation after node `end` changes a value in place.

    A change of a result that may be a view of the value counts, too. A stage must not change a
    tensor that it receives: the tensor is a leaf that requires grad, which autograd does not allow
    to change, and in a single process the sending stage uses the same memory.
    """
    views = [value]
    # The loop appends to the list that it iterates over.
    for view in views:
        for user in view.users:
            if position[user] <= end:
                continue
            if _find_written(user, model) is view:
                return True
            if not _is_fresh(user, model) and user not in views:
                views.append(user)
    return False


def _find_written(node: fx.Node, model: nn.Module) -> object:
    """Return the value that an operation changes in place, or None."""
    is_inplace = False
    if node.op == "call_module" and node.target != BY_MODE:
        is_inplace = getattr(attribute(model, node.target), "inplace", False)
    elif node.op == "call_method":
        is_inplace = _is_inplace_name(str(node.target))
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        is_inplace = node.target in INPLACE or _is_inplace_name(name) or _has_inplace_argument(node)
    if is_inplace:
        return (*node.args, *node.kwargs.values())[0]
    return None


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _has_inplace_argument(node: fx.Node) -> bool:
    """Return whether a call of a Python function has the argument `inplace=True`."""
    assert callable(node.target)
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        return bool(bound.arguments.get("inplace"))
    except (TypeError, ValueError):
        # Some builtins have no signature.
        return False


def _is_fresh(node: fx.Node, model: nn.Module) -> bool:
    """Return whether a result is certainly not a view of an argument.

    This holds for sums, products, and layers with parameters.
    """
    if node.op == "call_module" and node.target != BY_MODE:
        return next(attribute(model, node.target).parameters(), None) is not None
    return node.target in _FRESH or node.target in INPLACE


class Traced:
    """A model as a sequence of blocks.

    Attributes:
        cuts: The usable cuts in order. The name of a cut is that of the innermost module whose
            output is sent ("layer3.2": a stage ends after that block), or of an operation of the
            graph ("add_3") if no module returns the value. If there are no parameters between
            several points, only the last point is a cut, so that each stage has parameters.
        named: The cut for each name that a user may type. Other names of a cut are outer modules
            that end there ("layer3"), and points before it without parameters in between
            ("layer4" -> "flatten").
        users: Index of the block that uses a tensor, by the name of the tensor, for parameters and
            buffers whose use the graph does not show, such as those of a hook. Empty until the
            caller adds them.
    """

    def __init__(self, model: nn.Module, tracer: Tracer) -> None:
        self._model = model
        self._constants = tracer.constants
        self._nodes = list(tracer.graph.nodes)
        # Index of the last node before each cut, and the value that is sent.
        self._ends: list[tuple[int, fx.Node]] = []
        self.named: dict[str, str] = {}
        self.users: dict[str, int] = {}
        cuts = []
        for group in cut_points(self._nodes, model):
            usable = [point for point in group if point.usable]
            if usable:
                last = usable[-1]
                cuts.append(tracer.list_names(last.value)[0])
                self._ends.append((last.end, last.value))
                for point in group:
                    for name in tracer.list_names(point.value):
                        self.named[name] = cuts[-1]
        self.cuts = tuple(cuts)

    def stages(self, cuts: Sequence[str]) -> list[fx.GraphModule]:
        """Cut the model into `len(cuts)` + 1 modules. Each module reads the previous one's output.

        The stages contain the parameters and buffers of the model itself (move them with
        `stage.to`), and their state dicts together are that of the model. A tensor of `users` is in
        the stage with its block, and an unused tensor is in the last stage. Modules without
        parameters may be in several stages, which then share the training flag.

        Raises:
            RecipeError: The cuts are not usable; see `resolve_cuts`.
        """
        cut_names = resolve_cuts(self, cuts, len(cuts) + 1)
        cut_indices = [self.cuts.index(cut) for cut in cut_names]
        ends = [self._ends[index] for index in cut_indices]
        output = self._nodes[-1]
        ends.append((len(self._nodes) - 1, output.args[0]))
        stages = []
        start = 0
        received = self._nodes[0]
        for end, sent in ends:
            stages.append(self._build_stage(self._nodes[start : end + 1], received, sent))
            start = end + 1
            received = sent
        owners: dict[int, fx.GraphModule] = {}
        assigned_names = set()
        for stage in stages:
            for name, tensor in iterate_tensors(stage):
                assigned_names.add(name)
                owners.setdefault(id(tensor), stage)
        for name, tensor in iterate_tensors(self._model):
            # Unused tensors, and the second name of a tied tensor, are not in any stage yet.
            if name not in assigned_names:
                block = self.users.get(name, len(self.cuts))
                user = sum(index < block for index in cut_indices)
                owner = owners.setdefault(id(tensor), stages[user])
                _register(owner, name, tensor)
        saved = self._model.state_dict().keys()
        for stage in stages:
            for name, _ in stage.named_buffers(remove_duplicate=False):
                if name not in saved:
                    module_name, _, field = name.rpartition(".")
                    stage.get_submodule(module_name)._non_persistent_buffers_set.add(field)
        return stages

    def _build_stage(
        self,
        nodes: Sequence[fx.Node],
        received: fx.Node,
        sent: fx.Node,
    ) -> fx.GraphModule:
        graph = fx.Graph(tracer_cls=Tracer)
        copies = {received: graph.placeholder(received.name)}

        def copy_input(node: fx.Node) -> fx.Node:
            # A stage reads each attribute that it uses, even if the model read it earlier.
            if node not in copies:
                assert node.op == "get_attr"
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                copies[node] = graph.node_copy(node, copy_input)
        graph.output(copies[sent])
        attributes = {}
        for node in graph.nodes:
            target = str(node.target)
            if node.op not in ("get_attr", "call_module"):
                continue
            if target == BY_MODE:
                attributes[target] = ByMode().train(self._model.training)
            elif target in self._constants:
                attributes[target] = self._constants[target]
            else:
                attributes[target] = attribute(self._model, target)
        stage = fx.GraphModule(attributes, graph)
        stage.training = self._model.training
        return stage


def trace(model: nn.Module, name: str = "") -> Traced:
    """Record the model's operations in training and evaluation, and find its cuts.

    Args:
        model: The model. It is not changed.
        name: The model's name in the recipe, for messages.

    Raises:
        RecipeError: The model's forward pass cannot be recorded.
    """
    try:
        return Traced(model, record(model))
    except Untraceable as error:
        raise RecipeError(
            f"model.name={name or type(model).__name__} cannot be cut into stages: {error}; use "
            "mode=ddp, or write its forward as a straight line of operations on one tensor"
        ) from error


def resolve_cuts(
    traced: Traced,
    wanted: Sequence[str],
    stages: int,
) -> tuple[str, ...]:
    """Return the cuts for the names in `pipeline.cuts=[...]`.

    Raises:
        RecipeError: A name is not a cut, or the number or the order of the names is wrong.
    """
    option = f"pipeline.cuts=[{', '.join(wanted)}]"
    for name in wanted:
        if name not in traced.named:
            guess = recipes.find_nearest(name, traced.named)
            hint = f"did you mean {guess}? There are" if guess else "there are"
            raise RecipeError(
                f"{option}: {name} is not a usable cut; {hint}: {', '.join(traced.cuts) or 'none'}"
            )
    if len(wanted) != stages - 1:
        raise RecipeError(f"{option} has {len(wanted)} names and {stages} stages need {stages - 1}")
    chosen = tuple(traced.named[name] for name in wanted)
    for index, cut in enumerate(chosen):
        if cut in chosen[:index]:
            first = wanted[chosen.index(cut)]
            raise RecipeError(f"{option}: {first} and {wanted[index]} mean the same cut, {cut}")
    ordered = sorted(chosen, key=traced.cuts.index)
    if list(chosen) != ordered:
        raise RecipeError(
            f"{option} is not in the model's order; use pipeline.cuts=[{','.join(ordered)}]"
        )
    return chosen


def _register(
    module: nn.Module,
    name: str,
    tensor: Tensor,
) -> None:
    """Register a parameter or buffer under a dotted name. Missing modules on its path are added."""
    *path, field = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(field, tensor)
    else:
        module.register_buffer(field, tensor)

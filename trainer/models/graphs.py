"""Trace a model to a graph that is correct in training and in evaluation."""

import operator
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.errors import read_line
from trainer.models.undisturbed import find_change, read_generator_states, restore_after

BY_MODE = "_by_mode"


# These functions change a tensor in place, but return a new object for a number. fx would print
# `operator.iadd` as a statement that also changes the number for its other users.
def iadd(value: Any, other: Any) -> Any:
    value += other
    return value


def isub(value: Any, other: Any) -> Any:
    value -= other
    return value


def imul(value: Any, other: Any) -> Any:
    value *= other
    return value


def itruediv(value: Any, other: Any) -> Any:
    value /= other
    return value


INPLACE: set[Any] = {iadd, isub, imul, itruediv}


class Untraceable(Exception):
    """Raised if a model cannot be traced. The message is a clause for a longer message."""


class ByMode(nn.Module):
    """Constant with different values in training and evaluation.

    Tracing would otherwise store the value for the mode in which the model is traced.
    """

    def forward(self, in_training: Any, in_evaluation: Any) -> Any:
        return in_training if self.training else in_evaluation


class Value(fx.Proxy):
    """Proxy that records `a += b` as an in-place operation.

    fx would record a sum, which does not change views of `a`.
    """

    def _change(
        self,
        change: Callable[[Any, Any], Any],
        other: Any,
    ) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", change, (self, other), {})

    __iadd__ = partialmethod(_change, iadd)
    __isub__ = partialmethod(_change, isub)
    __imul__ = partialmethod(_change, imul)
    __itruediv__ = partialmethod(_change, itruediv)


class Tracer(fx.Tracer):
    """Tracer that also records constants, and the names of values.

    Attributes:
        graph: The operations of the model.
        constants: Values that tracing computed and the graph reads, by their names in the graph.
        ends: Names of the modules that return a value, the innermost module first.
        calls: Number of calls of a module, by its name.
    """

    # Without this option, values that are computed from buffers alone become constants.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.ends: defaultdict[fx.Node, list[str]] = defaultdict(list)
        self.calls: Counter[str] = Counter()
        self.constants: dict[str, Any] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is recorded as a single operation.

        Leaves of fx are also leaves here. Further leaves are scripted modules, normalization
        layers, modules without parameters that read `training`, such as stochastic depth, and
        modules with backward hooks, because such hooks cannot be registered on proxies.
        """
        if isinstance(m, torch.jit.ScriptModule):
            return True
        if super().is_leaf_module(m, module_qualified_name) or isinstance(m, _NormBase):
            return True
        if m._backward_hooks or m._backward_pre_hooks:
            return True
        code = getattr(type(m).forward, "__code__", None)
        reads_training = code is not None and "training" in code.co_names
        return reads_training and next(m.parameters(), None) is None

    def create_args_for_root(
        self,
        root_fn: Any,
        is_module: bool,
        concrete_args: Any = None,
    ) -> Any:
        """Create one input, and return the function and arguments that call the root module.

        The call includes the hooks of the root. Further arguments of `forward` keep their defaults.
        """
        inputs = self.create_proxy("placeholder", "inputs", (), {})
        return nn.Module._call_impl, [self.root, inputs]

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        out = super().call_module(m, forward, args, kwargs)
        name = self.path_of_module(m)
        self.calls[name] += 1
        if isinstance(out, fx.Proxy):
            self.ends[out.node].append(name)
        return out

    def list_names(self, value: fx.Node) -> list[str]:
        """Return unique names of a value.

        These are the names of the modules that return the value and are called only once, the
        innermost first. If there are no such modules, the only name is that of the operation.
        """
        modules = [name for name in self.ends[value] if self.calls[name] == 1]
        if modules:
            return modules
        return [f"{value.name}()" if value.name in self.calls else value.name]


def record(model: nn.Module) -> Tracer:
    """Trace a model in both modes into a graph.

    Returns:
        The tracer with the graph.

    Raises:
        Untraceable: The model has control flow on values, several inputs or outputs, random
            numbers, or operations that depend on the mode.
    """
    training = _trace(model, is_training=True)
    evaluation = _trace(model, is_training=False)
    # Make the graph of training correct for evaluation as well: a `ByMode` replaces each constant
    # that differs.
    pairs = list(zip(training.graph.nodes, evaluation.graph.nodes, strict=False))
    for node, other in pairs:
        operation = node.op, node.name, node.target
        if operation != (other.op, other.name, other.target):
            raise Untraceable(
                f"in training it computes {node.name} where in evaluation it computes {other.name}"
            )
        node.args = _merge_argument(node, node.args, other.args)
        node.kwargs = _merge_argument(node, node.kwargs, other.kwargs)
    for name, value in training.constants.items():
        if not _is_same(value, evaluation.constants[name]):
            raise Untraceable("its forward makes constants that are not the same each time")
    if not isinstance(training.graph.output_node().args[0], fx.Node):
        raise Untraceable("it returns more than one tensor")
    return training


def _trace(model: nn.Module, is_training: bool) -> Tracer:
    tracer = Tracer()
    states = read_generator_states()
    # Tracing runs the user's code, and a model's own `train`, which may change any state.
    with restore_after([model], weights=True):
        attributes = {*vars(model.train(is_training))}
        try:
            tracer.trace(model)
        except Exception as error:
            # The model's code may raise any error if its inputs are proxies.
            raise Untraceable(f"{read_line(error)}{_locate(error)}") from error
        for name, value in vars(model).items():
            if name not in attributes:
                tracer.constants[name] = value
        changed_state = find_change(states, read_generator_states())
    if changed_state is not None:
        raise Untraceable(
            f"its forward draws random numbers that do not follow from its input ({changed_state})"
        )
    return tracer


def _locate(error: BaseException) -> str:
    """Format the file and line of the model's code that raised an error."""
    torch_folder = Path(torch.__file__).parent
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path != Path(__file__) and not path.is_relative_to(torch_folder):
            location = f" ({path.name}, line {frame.lineno})"
    return location


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and (value.is_meta or torch.equal(value, other))
    return bool(value == other)


def _merge_argument(
    node: fx.Node,
    value: Any,
    other: Any,
) -> Any:
    """Return an argument of `node` for both modes.

    Args:
        node: The operation in the graph of training.
        value: The argument in training.
        other: The argument in evaluation.
    """
    is_node = isinstance(value, fx.Node)
    is_other_node = isinstance(other, fx.Node)
    if is_node and is_other_node and value.name == other.name:
        return value
    if is_node or is_other_node:
        raise Untraceable(
            f"in training it computes {node.name} from other values than in evaluation"
        )
    are_sequences = isinstance(value, list | tuple) and isinstance(other, list | tuple)
    if are_sequences and len(value) == len(other):
        pairs = zip(value, other, strict=True)
        return type(value)(_merge_argument(node, *pair) for pair in pairs)
    are_mappings = isinstance(value, dict) and isinstance(other, dict)
    if are_mappings and value.keys() == other.keys():
        return {key: _merge_argument(node, value[key], other[key]) for key in value}
    if isinstance(value, slice) and isinstance(other, slice):
        return slice(
            _merge_argument(node, value.start, other.start),
            _merge_argument(node, value.stop, other.stop),
            _merge_argument(node, value.step, other.step),
        )
    if type(value) is type(other) and value == other:
        return value
    with node.graph.inserting_before(node):
        return node.graph.call_module(BY_MODE, (value, other))


def attribute(model: nn.Module, target: object) -> Any:
    """Return the attribute of `model` with the dotted name `target`, such as `layer1.0.weight`."""
    return operator.attrgetter(str(target))(model)

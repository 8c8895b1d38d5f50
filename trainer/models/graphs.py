"""A model's graph, which is right in training and in evaluation."""

from __future__ import annotations

import operator
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.models.undisturbed import generators, undisturbed

BY_MODE = "_by_mode"


def iadd(value: Any, other: Any) -> Any:
    value += other  # in place for a tensor, a new object for a number
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
    """Why a model cannot be traced, as a clause."""


class ByMode(nn.Module):
    """A constant that differs in training and evaluation: tracing alone would freeze `self.training`."""

    def forward(self, in_training: Any, in_evaluation: Any) -> Any:
        return in_training if self.training else in_evaluation


class Value(fx.Proxy):
    """A proxy that records `a += b` in place; fx would record a sum, which views of `a` do not see."""

    def _changed(self, change: Callable[[Any, Any], Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", change, (self, other), {})

    __iadd__ = partialmethod(_changed, iadd)
    __isub__ = partialmethod(_changed, isub)
    __imul__ = partialmethod(_changed, imul)
    __itruediv__ = partialmethod(_changed, itruediv)


class Tracer(fx.Tracer):
    """Records for each value the modules that return it, innermost first."""

    proxy_buffer_attributes = True  # else what is computed from buffers alone would be a constant

    def __init__(self) -> None:
        super().__init__()
        self.ends: defaultdict[fx.Node, list[str]] = defaultdict(list)
        self.calls: Counter[str] = Counter()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Also normalisation, modules without parameters that read `training` (stochastic depth), and those with hooks
        of the backward pass, which proxies do not have."""
        asks = "training" in getattr(type(m).forward, "__code__", _no_code).co_names
        return (
            super().is_leaf_module(m, module_qualified_name)
            or isinstance(m, _NormBase)
            or bool(m._backward_hooks or m._backward_pre_hooks)
            or (asks and not any(True for _ in m.parameters()))
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One input, and the root's own hooks; other arguments of `forward` keep their defaults."""
        return nn.Module._call_impl, [self.root, self.create_proxy("placeholder", "inputs", (), {})]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = super().call_module(m, forward, args, kwargs)
        name = self.path_of_module(m)
        self.calls[name] += 1
        if isinstance(out, fx.Proxy):
            self.ends[out.node].append(name)
        return out


_no_code = (lambda: None).__code__


@dataclass(frozen=True)
class Recording:
    """A model's graph, and the constants of tracing by their name in the graph."""

    graph: fx.Graph
    constants: dict[str, Any]
    tracer: Tracer

    def names(self, value: fx.Node) -> list[str]:
        """The modules that return a value, innermost first; else the name of the operation. Unique."""
        modules = [name for name in self.tracer.ends[value] if self.tracer.calls[name] == 1]
        return modules or [value.name if value.name not in self.tracer.calls else f"{value.name}()"]


def record(model: nn.Module) -> Recording:
    """Trace a model in both modes into one graph.

    Raises:
        Untraceable: control flow on values, several inputs or outputs, random numbers, or operations that depend on
            the mode.
    """
    with undisturbed([model], torch.device("cpu")):
        training, evaluation = (_record(model, mode) for mode in (True, False))
    _merge(training, evaluation)
    if not isinstance(training.graph.output_node().args[0], fx.Node):
        raise Untraceable("it returns more than one tensor")
    return training


def _record(model: nn.Module, mode: bool) -> Recording:
    tracer, before = Tracer(), {module: dict(vars(module)) for module in model.train(mode).modules()}
    states = generators()
    try:
        graph = tracer.trace(model)
    except Exception as error:  # the model's code, run with proxies, may raise anything
        raise Untraceable(f"{' '.join(str(error).split())[:160]}{_where(error)}") from error
    finally:
        constants = {name: vars(model)[name] for name in set(vars(model)) - set(before[model])}
        for module, values in before.items():
            vars(module).clear()
            vars(module).update(values)
    drawn = [name for name, state in generators().items() if state != states[name]]
    if drawn:
        raise Untraceable(f"its forward draws random numbers of {drawn[0]} that do not follow from its input")
    return Recording(graph, constants, tracer)


def _where(error: BaseException) -> str:
    """The line of the model's code that raised."""
    inner = (Path(torch.__file__).parent, Path(__file__))
    frames = traceback.extract_tb(error.__traceback__)
    outer = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(path) for path in inner)]
    return f" ({Path(outer[-1].filename).name}, line {outer[-1].lineno})" if outer else ""


def _merge(training: Recording, evaluation: Recording) -> None:
    """Make the graph of training mode right for evaluation too: constants that differ are chosen by mode."""
    pairs = list(zip(training.graph.nodes, evaluation.graph.nodes, strict=False))
    for node, other in pairs:
        if (node.op, node.name, node.target) != (other.op, other.name, other.target):
            raise Untraceable(f"in training it computes {node.name} where in evaluation it computes {other.name}")
        node.args = _either(node, node.args, other.args)
        node.kwargs = _either(node, node.kwargs, other.kwargs)
    if not all(_same(value, evaluation.constants[name]) for name, value in training.constants.items()):
        raise Untraceable("its forward makes constants that are not the same each time")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and (value.is_meta or torch.equal(value, other))
    return bool(value == other)


def _either(node: fx.Node, value: Any, other: Any) -> Any:
    """An argument of `node` for both modes: `value` in training, `other` in evaluation."""
    if isinstance(value, fx.Node) and isinstance(other, fx.Node) and value.name == other.name:
        return value
    if isinstance(value, list | tuple) and isinstance(other, list | tuple) and len(value) == len(other):
        return type(value)(_either(node, a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
        return {key: _either(node, value[key], other[key]) for key in value}
    if isinstance(value, slice) and isinstance(other, slice):
        return slice(*(_either(node, getattr(value, end), getattr(other, end)) for end in ("start", "stop", "step")))
    if isinstance(value, fx.Node) or isinstance(other, fx.Node):
        raise Untraceable(f"in training it computes {node.name} from other values than in evaluation")
    if type(value) is type(other) and value == other:
        return value
    with node.graph.inserting_before(node):
        return node.graph.call_module(BY_MODE, (value, other))


def attribute(model: nn.Module, target: object) -> Any:
    """The attribute with a dotted name."""
    return operator.attrgetter(str(target))(model)

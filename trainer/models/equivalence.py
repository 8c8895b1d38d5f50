"""Check before the first step that a replacement of a model trains as the model does.

A replacement is, for example, a pipeline of stages. Model and replacement run the same two training
passes. Outputs, gradients, weights, buffers, attributes (counters, tensors, arrays) and random
states are compared. The second pass shows differences in the state that the first pass leaves. All
state is restored afterwards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainer.errors import RecipeError, is_out_of_memory
from trainer.models.reachable import Reachable
from trainer.models.undisturbed import is_plain, read_generator_states, restore_after
from trainer.recipe.text import list_some

# Maximum relative error of tensors that count as equal, by precision. Model and replacement run the
# same operations on one device, so a larger error means that they compute something different.
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}
AS_IT_IS = "mode=ddp, which runs the model as it is"
# Maximum difference between a CUDA graph replay and an eager pass, as a multiple of the difference
# between two replays. Two replays differ if a kernel adds numbers in a nondeterministic order.
NOISE = 8
# Number of elements that are multiplied at a time, so that they fit the CPU's cache.
CHUNK_SIZE = 2**17
Made = TypeVar("Made")
Tensors = dict[str, Tensor | None]


class Passes(NamedTuple):
    """Record of training passes. The keys of all dictionaries are the names that messages use.

    Attributes:
        tensors: One dictionary before the first pass and one after each pass. Each has the buffers,
            the attributes, and for each weight a copy, or None if the weight is unchanged. Those
            after a pass also have the output.
        gradients: Gradients, accumulated over all passes.
        plain: Numbers, strings and lengths in attributes, and states of the random generators,
            after each pass.
    """

    tensors: list[Tensors]
    gradients: Tensors
    plain: list[dict[str, object]]


def try_fewest_rows(
    most: int,
    make: Callable[[int], Made],
    say: Callable[[str], None],
    name: str,
) -> Made | None:
    """Call `make` with 1, 2 and `most` rows until the model accepts the number of rows.

    Args:
        most: Maximum number of rows.
        make: Called with a number of rows. An exception means that the model does not accept it.
        say: Prints a warning if the memory is too small.
        name: Name of the model, for the warning.

    Returns:
        The result of `make`, or None if the memory is too small.

    Raises:
        Exception: `make` raised it for `most` rows.
    """
    for rows in sorted({1, 2, most}):
        try:
            return make(rows)
        except Exception as error:
            # The model's code may raise any exception.
            if is_out_of_memory(error):
                say(
                    f"WARNING: {name} is not compared with what replaces it: memory is too small "
                    "for both"
                )
                return None
            if rows >= most:
                raise
    return None


def observe(
    model: nn.Module,
    train: Callable[[], object],
    run: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    after: Callable[[bool], object] = lambda last: None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    evaluate: Callable[[], object] | None = None,
) -> Passes:
    """Record training passes of a model, or of a replacement with the same weights, and undo them.

    Between two passes the model is switched to evaluation and back, as at the end of an epoch,
    because a model's own `train()` may count epochs.

    Args:
        model: The model whose state is recorded.
        train: Switches the model to training.
        run: Runs a forward pass and returns the outputs.
        inputs: A micro-batch (N, ...) for each pass.
        after: Called at the end of each pass, with True after the last one.
        parameters: Parameters of this rank by name. The default is all parameters of `model`.
        evaluate: Switches the model to evaluation. The default is the model's own `eval()`.
    """
    if parameters is None:
        parameters = dict(model.named_parameters())
    originals = {
        name: (parameter.detach().clone(), parameter.grad) for name, parameter in parameters.items()
    }
    # Only objects that exist before the passes are compared. An object that each pass replaces,
    # such as stored activations, carries no state from one pass to the next.
    initial_objects = {
        name: value
        for name, value in Reachable([model]).values
        if isinstance(value, Tensor | np.ndarray)
    }

    def read_state(reachable: Reachable) -> Tensors:
        state = {}
        for name, parameter in parameters.items():
            is_unchanged = torch.equal(parameter, originals[name][0])
            state[f"change of {name}"] = None if is_unchanged else parameter.detach().clone()
        # An attribute with a single number may be a counter, even if each pass assigns a new tensor
        # to it. For these attributes, the current tensor is recorded instead of the initial one.
        scalars = {
            name: value
            for name, value in reachable.values
            if isinstance(value, Tensor) and value.numel() == 1
        }
        for name, value in initial_objects.items():
            state[name] = _copy_numbers(scalars.get(name, value))
        for name, buffer in model.named_buffers():
            state[f"buffer {name}"] = buffer.clone()
        return state

    plain = []
    try:
        with restore_after([model], inputs[0].device), torch.enable_grad():
            for parameter in parameters.values():
                parameter.grad = None
            train()
            tensors = [read_state(Reachable([model]))]
            for number, micro_batch in enumerate(inputs, 1):
                if number > 1:
                    (evaluate or model.eval)()
                    train()
                out = run(micro_batch)
                # The gradient of the outputs is random, because no loss is computed here.
                if out.requires_grad:
                    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
                    torch.autograd.backward(out, noise.to(out))
                after(number == len(inputs))
                reachable = Reachable([model])
                tensors.append(read_state(reachable) | {"output": out.detach()})
                plain.append(read_plain_attributes(model, reachable) | read_generator_states())
            gradients = {f"gradient of {name}": p.grad for name, p in parameters.items()}
            return Passes(tensors, gradients, plain)
    finally:
        with torch.no_grad():
            for name, (value, gradient) in originals.items():
                parameters[name].copy_(value)
                parameters[name].grad = gradient


def read_plain_attributes(
    model: nn.Module,
    reachable: Reachable,
) -> dict[str, object]:
    """Return values that a model's code may branch on, under the names that messages use.

    These are the numbers, strings and lengths in `reachable`, which the code reaches, and
    `requires_grad` of each parameter.
    """
    flags = {f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()}
    return reachable.plain | flags


def _copy_numbers(value: Any) -> Tensor | None:
    """Copy a tensor or array that a pass can change in place; return None for other values."""
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True) if is_plain(value) else None
    # torch cannot represent an array of objects, so None is returned for it.
    with suppress(TypeError, ValueError):
        if value.flags.writeable:
            return torch.from_numpy(value.copy())
    return None


def _find_counters(passes: Passes) -> dict[str, tuple[object, object]]:
    """Return the attributes that passes after the first one change, with two values of each.

    These are the values after the first and after the last pass, by the name of the attribute. An
    attribute that only the first pass sets, such as a size, is not a counter.
    """
    first = passes.plain[0]
    return {
        name: (first.get(name), value)
        for name, value in passes.plain[-1].items()
        if first.get(name) != value
    }


def check_equivalent(
    what: str,
    whole: Passes,
    replaced: Passes,
    tolerance: float,
    floor: float = 0.0,
    instead: str = AS_IT_IS,
) -> None:
    """Check that the replacement of a model trains as the model does.

    Args:
        what: Name of the replacement, for messages.
        whole: Passes of the model.
        replaced: Passes of the replacement.
        tolerance: Allowed distance between two tensors, relative to the norm.
        floor: Minimum norm that `tolerance` is multiplied by. Gradients that should be zero consist
            of rounding errors, which depend on the order of sums.
        instead: What to use instead, for messages.

    Raises:
        RecipeError: The passes of the replacement differ from those of the model.
    """
    # A description of each difference, beginning with the counters. It starts with the name of the
    # value that differs.
    differences = []
    counters = _find_counters(whole)
    others = _find_counters(replaced)
    for name in counters | others:
        figures = others.get(name, ())
        # Floats in a container that only the replacement changes are not compared. They are taken
        # for logged numbers, which the model's code does not read.
        is_log = name.endswith("]") and all(isinstance(figure, float) for figure in figures)
        if name not in counters and is_log:
            continue
        if not _are_close(counters.get(name, ()), figures, tolerance):
            differences.append(f"{name} (changed otherwise by one of the two)")
    all_tensors = [*whole.tensors, whole.gradients]
    all_others = [*replaced.tensors, replaced.gradients]
    for tensors, other_tensors in zip(all_tensors, all_others, strict=True):
        for name, value in tensors.items():
            distance = _describe_distance(value, other_tensors.get(name), tolerance, floor)
            if distance is not None:
                differences.append(f"{name} ({distance})")
    if differences:
        raise RecipeError(
            f"{what} would train another model: in two passes of both what differs is the "
            f"{list_some(differences, 1)}; use {instead}"
        )


def _are_close(
    values: Sequence[object],
    others: Sequence[object],
    tolerance: float,
) -> bool:
    """Return whether values are equal. Floats may differ by `tolerance`."""
    if len(values) != len(others):
        return False
    for value, other in zip(values, others, strict=True):
        if isinstance(value, float) and isinstance(other, float):
            if not math.isclose(value, other, rel_tol=tolerance):
                return False
        elif value != other:
            return False
    return True


def relative_error(
    one: Tensor,
    other: Tensor,
    floor: float = 0.0,
) -> float:
    """Return the norm of the difference, divided by the larger of `floor` and the norm of `one`.

    The result is infinite if the tensors have different shapes or types.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    if one.is_complex():
        one = torch.view_as_real(one)
        other = torch.view_as_real(other)
    # Equal infinities, and two NaNs, count as equal.
    first = one.double().nan_to_num(1e30, 2e30, -2e30)
    second = other.double().nan_to_num(1e30, 2e30, -2e30)
    norm = first.norm().clamp(min=floor)
    return float((first - second).norm() / norm)


def _describe_distance(
    one: Tensor | None,
    other: Tensor | None,
    tolerance: float,
    floor: float = 0.0,
) -> str | None:
    """Describe the difference of two tensors; return None if it is within `tolerance`."""
    if one is None or other is None:
        return None if one is other else "there in one of the two alone"
    distance = relative_error(one, other, floor)
    if math.isinf(distance):
        return "of another shape or type"
    if distance <= tolerance:
        return None
    return f"{distance:.2g} of its norm apart"


@dataclass(frozen=True, eq=False)
class Sketch:
    """Summary of a tensor in two numbers.

    Attributes:
        product: Sum of the elements times fixed random factors. If an element changes, or two
            elements are exchanged, the sum changes.
        norm: Square root of the sum of squares.
    """

    product: float
    norm: float

    def __eq__(self, other: object) -> bool:
        """Return whether the sketches belong to tensors that are equal up to rounding."""
        if not isinstance(other, Sketch):
            return False
        # With `not ... >` instead of `<=`, NaNs count as equal.
        return not abs(self.product - other.product) > TOLERANCE["fp32"] * self.norm


def sketch_tensors(named: Mapping[str, Tensor]) -> dict[str, Sketch]:
    """Return a sketch of each tensor by name. The host waits once for each device."""
    rows: dict[torch.device, dict[str, Tensor]] = {}
    noise = torch.randn(CHUNK_SIZE, generator=torch.Generator().manual_seed(0))
    for name, tensor in named.items():
        real = tensor.detach()
        if real.is_complex():
            real = torch.view_as_real(real)
        noise = noise.to(real.device)
        product = torch.zeros((), device=real.device)
        squares = torch.zeros((), device=real.device)
        for index, chunk in enumerate(torch.split(real.reshape(-1), CHUNK_SIZE)):
            numbers = chunk.float()
            # The factor differs between chunks, so that an exchange of two chunks changes the sum.
            products = numbers * noise[: len(numbers)]
            product += math.cos(index) * products.sum()
            squares += numbers.square().sum()
        rows.setdefault(real.device, {})[name] = torch.stack([product, squares.sqrt()])
    sketches = {}
    for rows_on_device in rows.values():
        numbers_on_host = torch.stack([*rows_on_device.values()]).tolist()
        for name, (host_product, norm) in zip(rows_on_device, numbers_on_host, strict=True):
            sketches[name] = Sketch(host_product, norm)
    return sketches


def list_changing_state(passes: Passes) -> list[str]:
    """Return the names of the state that passes change, except random states.

    A model with such state trains differently if a step is divided into more passes.
    """
    counters = _find_counters(passes)
    names = [name for name in counters if not name.startswith("random state ")]
    after = passes.tensors[-1]
    for name, tensor in passes.tensors[0].items():
        if _describe_distance(tensor, after[name], TOLERANCE["fp32"]) is not None:
            names.append(name)
    return names


def draws_random_numbers(passes: Passes) -> bool:
    """Return whether the passes drew random numbers from torch's CPU generator."""
    return "random state of torch" in _find_counters(passes)

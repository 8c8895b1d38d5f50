"""Check of the keys `model.args` and `optimizer.args` against the signature of a function."""

import inspect
import json
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter
from pydantic import ValidationError as InvalidValueError

from trainer.errors import RecipeError
from trainer.recipe.text import find_nearest, format_value

KEYWORDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def list_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function that can be passed by name.

    A parameter `**kwargs` is in the result too.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, SyntaxError, AttributeError):
        # Annotations that are strings may name what only a type checker imports.
        signature = inspect.signature(function)
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (*KEYWORDS, Parameter.VAR_KEYWORD)
    }


def check_arguments(
    key: str,
    values: Mapping[str, Any],
    parameters: Mapping[str, Parameter],
    owned: Mapping[str, str],
    subject: str,
    accepts_any: bool = False,
) -> dict[str, Any]:
    """Check arguments of the user, and convert them to the types of the parameters.

    Args:
        key: the key that has the arguments, such as "model.args".
        values: the arguments by name.
        parameters: parameters of the function, from `list_parameters`.
        owned: what to type instead of an argument that the program sets, by its name.
        subject: the key and value that choose the function, as "model.name=resnet18".
        accepts_any: whether a parameter `**kwargs` accepts all names.

    Raises:
        RecipeError: an argument is unknown, has the wrong type, or is set by the program.
    """
    names = [name for name, one in parameters.items() if one.kind in KEYWORDS and name not in owned]
    has_rest = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    checked = {}
    for name, value in values.items():
        argument = f"{key}.{name}={format_value(value)}"
        if name in owned:
            raise RecipeError(f"{argument} is set by the program: {owned[name]}")
        if name in names:
            checked[name] = _convert(argument, value, parameters[name])
        elif has_rest and accepts_any:
            checked[name] = value
        else:
            guess = find_nearest(name, names)
            hint = ""
            if guess:
                hint = f"did you mean {key}.{guess}? "
            listed = ", ".join(names) or "none"
            raise RecipeError(
                f"{argument} is not an argument of {subject}; {hint}arguments: {listed}"
            )
    return checked


def _convert(argument: str, value: Any, parameter: Parameter) -> Any:
    """Return a value with the type that the annotation of its parameter asks for."""
    annotation = parameter.annotation
    is_default = type(value) is type(parameter.default) and value == parameter.default
    if annotation is Parameter.empty or is_default:
        return value
    try:
        adapter = TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeError, NameError):
        # The annotation is not a type.
        return value
    try:
        # JSON has lists but no tuples, so a list is accepted for either.
        return adapter.validate_json(json.dumps(value), strict=True)
    except InvalidValueError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        expected = getattr(annotation, "__name__", str(annotation).replace("typing.", ""))
        raise RecipeError(f"{argument} must be {expected} ({reason})") from None

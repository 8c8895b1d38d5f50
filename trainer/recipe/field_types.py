"""Types of values that keys of a recipe have, with messages for others."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from trainer.recipe.text import shown

LARGEST_SIDE = 2**14  # pixels
MOST_CHANNELS = 64
DEVICE = r"cpu|cuda(:\d{1,3})?"


def _devices(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not value:
        example = value if isinstance(value, str) and re.fullmatch(DEVICE, value) else "cuda:0"
        raise ValueError(f"must be auto or a list, as in devices=[{example}]")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(DEVICE, name):
            raise ValueError(f"'{shown(name)}' is not a device: write cpu, cuda or cuda:0")
    return value


def _count(value: Any) -> Any:
    if value != "auto" and not (type(value) is int and value >= 1):
        raise ValueError("must be auto or a number, as in 8")
    return value


def _cache(value: Any) -> Any:
    off = value in ("none", None) or value is False
    return "off" if off else "disk" if value is True else value  # YAML's off and on


def _names(value: Any) -> list[str]:
    """A name or a list of them, as layers 0.3 or 4 have; empty where it holds anything else."""
    names = [str(name) if type(name) is int else name for name in (value if isinstance(value, list) else [value])]
    return names if all(isinstance(name, str) and name for name in names) else []


def _cuts(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not (names := _names(value)):
        raise ValueError("must be auto or a list of names, as in [layer2.3] or ['0.3']")
    return names


def _logger(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be true, or text: a project's name for wandb, an address for mlflow")


def _freeze(value: Any) -> Any:
    if value is None or (type(value) is int and value != 0):
        return value
    if not isinstance(value, str | list) or not (names := _names(value)):
        raise ValueError("must be a number of blocks, as in 4, a list of names, as in [conv1], or null")
    return names


def _numbers(value: Any, low: float, high: float) -> list[float]:
    """A list of numbers within limits; empty where it is anything else."""
    numbers = value if isinstance(value, list) else []
    return numbers if all(type(number) in (int, float) and low <= number <= high for number in numbers) else []


def _image_size(value: Any) -> Any:
    sides = [*value] if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= LARGEST_SIDE for side in sides):
        raise ValueError(f"must be pixels from 1 to {LARGEST_SIDE}, or height and width, as in [224,320]")
    return sides if sides[0] != sides[1] else sides[0]  # a square is a number, however it is typed


def _fractions(value: Any) -> Any:
    numbers = _numbers(value, 0, 1)
    if not 1 <= len(numbers) <= MOST_CHANNELS:
        raise ValueError("must be a number from 0 to 1 for each channel, as in [0.485, 0.456, 0.406] (of 255: divide)")
    return [float(number) for number in numbers]


def _deviations(value: Any) -> Any:
    numbers = _fractions(value)
    if not all(numbers):
        raise ValueError("must be above 0, as in [0.229, 0.224, 0.225]")
    return numbers


def _black_and_white(value: Any) -> Any:
    numbers = _numbers(value, -(2**63), 2**63)
    if len(numbers) != 2:
        raise ValueError("must be the values that are black and white, as in [0, 4095]")
    if not numbers[0] < numbers[1]:
        raise ValueError("must begin with the smaller value, as in [0, 4095]")
    return [float(number) for number in numbers]


def _restart(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    numbers = _numbers(value, 1e-9, 1e9)
    if not numbers or sorted({*numbers}) != numbers:
        raise ValueError("must be true, false, or a list of epochs in their order, as in [10, 20]")
    return [float(number) for number in numbers]


def _shares(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    numbers = _numbers(value, 1e-6, 1e6)
    if len(numbers) < 2:
        raise ValueError("must be auto, or a number from 1e-06 to 1e+06 for each process, as in [3, 1]")
    return numbers


def _columns(value: Any) -> Any:
    if not (names := _names(value)):
        raise ValueError("must be a column's name, or a list of names, as in [age, height]")
    return names if isinstance(value, list) else names[0]


_OneName = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
_Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
PixelSize = Annotated[_Side | Annotated[list[_Side], Field(min_length=2, max_length=2)], BeforeValidator(_image_size)]
Fractions = Annotated[list[float], BeforeValidator(_fractions)]
Deviations = Annotated[list[float], BeforeValidator(_deviations)]
PixelRange = Annotated[list[float], BeforeValidator(_black_and_white)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MicroBatches = Annotated[Literal["auto"] | Annotated[int, Field(ge=1)], BeforeValidator(_count)]
Workers = Annotated[int, Field(ge=0, le=256)]
Name = Annotated[str, WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
Names = Annotated[list[Name], Field(min_length=1)]
Columns = Annotated[_OneName | Names, BeforeValidator(_columns)]
Cache = Annotated[Literal["off", "disk"], BeforeValidator(_cache)]
Check = Annotated[
    Literal["headers", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]  # YAML's off
Cuts = Annotated[Literal["auto"] | Names, BeforeValidator(_cuts)]
Device = Annotated[str, Field(pattern=rf"^({DEVICE})$")]
Devices = Annotated[Literal["auto"] | Annotated[list[Device], Field(min_length=1)], BeforeValidator(_devices)]
Shares = Annotated[Literal["auto"] | Annotated[list[int | float], Field(min_length=2)] | None, BeforeValidator(_shares)]
Logger = Annotated[bool | str | None, BeforeValidator(_logger)]
_Blocks = Annotated[int, WithJsonSchema({"type": "integer", "not": {"const": 0}})]
Restart = Annotated[
    bool | Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)], BeforeValidator(_restart)
]
Freeze = Annotated[_Blocks | _OneName | Names | None, BeforeValidator(_freeze)]

"""Kinds of values that keys of a recipe have, with what is said of others."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from trainer.recipe.text import shown

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


def _workers(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 256):
        raise ValueError("must be a number from 0 to 256, auto or null")
    return value


def _count(value: Any) -> Any:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("must be auto or a number, as in 8")
    return value


def _cache(value: Any) -> Any:
    if value in ("none", None):
        return "off"
    return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value  # YAML's off and on


def _cuts(value: Any) -> Any:
    if value == "auto":
        return value
    names = [str(name) if type(name) is int else name for name in value] if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be auto or a list of names, as in [layer2.3] or ['0.3']")
    return names


def _logger(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be true, or text: a project's name for wandb, an address for mlflow")


def _freeze(value: Any) -> Any:
    if value is None or (type(value) is int and value != 0):
        return value
    listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    names = [str(name) if type(name) is int else name for name in listed]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a number of blocks, as in 4, a list of names, as in [conv1], or null")
    return names


def _shares(value: Any) -> Any:
    values = value if isinstance(value, list) else []
    if len(values) not in (1, 3) or not all(type(one) in (int, float) and 0 <= one <= 1 for one in values):
        raise ValueError("must be a number from 0 to 1 for each channel, as in [0.485, 0.456, 0.406] (of 255: divide)")
    return [float(one) for one in values]


def _spreads(value: Any) -> Any:
    values = _shares(value)
    if not all(values):
        raise ValueError("must be above 0, as in [0.229, 0.224, 0.225]")
    return values


def _black_and_white(value: Any) -> Any:
    values = value if isinstance(value, list) else []
    if len(values) != 2 or not all(type(one) in (int, float) and abs(one) < 2**63 for one in values):
        raise ValueError("must be the values that are black and white, as in [0, 4095]")
    if not values[0] < values[1]:
        raise ValueError("must begin with the smaller value, as in [0, 4095]")
    return [float(one) for one in values]


def _columns(value: Any) -> Any:
    names = [str(one) if type(one) is int else one for one in (value if isinstance(value, list) else [value])]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a column's name, or a list of names, as in [age, height]")
    return names if isinstance(value, list) else names[0]


def _root(value: Any) -> Any:
    """A list of shards is what a shell writes with braces."""
    listed = isinstance(value, list) and value and all(isinstance(one, str) and one for one in value)
    return f"{{{','.join(value)}}}" if listed and len(value) > 1 else value[0] if listed else value


_OneName = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Shares = Annotated[list[float], BeforeValidator(_shares)]
Spreads = Annotated[list[float], BeforeValidator(_spreads)]
PixelRange = Annotated[list[float], BeforeValidator(_black_and_white)]
Root = Annotated[str | None, BeforeValidator(_root)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MicroBatches = Annotated[Literal["auto"] | Annotated[int, Field(ge=1)], BeforeValidator(_count)]
Workers = Annotated[Literal["auto"] | Annotated[int, Field(ge=0, le=256)], BeforeValidator(_workers)]
Name = Annotated[str, WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
Names = Annotated[list[Name], Field(min_length=1)]
Columns = Annotated[_OneName | Names, BeforeValidator(_columns)]
Cache = Annotated[Literal["off", "ram", "disk", "auto"], BeforeValidator(_cache)]
Cuts = Annotated[Literal["auto"] | Names, BeforeValidator(_cuts)]
Device = Annotated[str, Field(pattern=rf"^({DEVICE})$")]
Devices = Annotated[Literal["auto"] | Annotated[list[Device], Field(min_length=1)], BeforeValidator(_devices)]
Logger = Annotated[bool | str | None, BeforeValidator(_logger)]
_Blocks = Annotated[int, WithJsonSchema({"type": "integer", "not": {"const": 0}})]
Freeze = Annotated[_Blocks | _OneName | Names | None, BeforeValidator(_freeze)]

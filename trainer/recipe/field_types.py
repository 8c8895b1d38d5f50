"""Types of the values of recipe keys, with messages for invalid values."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from trainer.recipe.text import format_value

# Maximum side of an image, in pixels.
LARGEST_SIDE = 2**14
MOST_CHANNELS = 64
# Regular expression of a device's name.
DEVICE = r"cpu|cuda(:\d{1,3})?"


def _devices(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not value:
        example = "cuda:0"
        if isinstance(value, str) and re.fullmatch(DEVICE, value):
            example = value
        count = ""
        # Users of other programs may type a number of devices. The exact type is compared, because
        # a boolean is also an instance of int.
        if type(value) is int:
            count = f"; nproc={value} starts {value} processes"
        raise ValueError(f"must be auto or a list, as in devices=[{example}]{count}")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(DEVICE, name):
            raise ValueError(f"'{format_value(name)}' is not a device: write cpu, cuda or cuda:0")
    return value


def _count(value: Any) -> Any:
    # A boolean is an int for isinstance, but not a number here.
    if value != "auto" and not (type(value) is int and value >= 1):
        raise ValueError("must be auto or a number, as in 8")
    return value


def _cache(value: Any) -> Any:
    # YAML 1.1 reads `off` as False and `on` as True.
    if value in ("none", None) or value is False:
        return "off"
    if value is True:
        return "disk"
    return value


def _names(value: Any) -> list[str]:
    """Convert a name or a list of names to a list; empty if `value` is invalid."""
    if not isinstance(value, list):
        value = [value]
    names = []
    for name in value:
        # Layers of nn.Sequential have numbers as names.
        if type(name) is int:
            name = str(name)
        if not isinstance(name, str) or not name:
            return []
        names.append(name)
    return names


def _cuts(value: Any) -> Any:
    if value == "auto":
        return value
    if not isinstance(value, list) or not (names := _names(value)):
        raise ValueError("must be auto or a list of names, as in [layer2.3] or ['0.3']")
    return names


def _metrics(value: Any) -> Any:
    names = _names(value)
    if not names:
        raise ValueError("must be a list of names of metrics, as in [auroc, f1_macro]")
    return names


def _logger(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be true, or text: a project's name for wandb, an address for mlflow")


def _freeze(value: Any) -> Any:
    # 0 is refused, because it could mean the first block or no block.
    if value is None or (type(value) is int and value != 0):
        return value
    if not isinstance(value, str | list) or not (names := _names(value)):
        raise ValueError(
            "must be a number of blocks, as in 4, a list of names, as in [conv1], or null"
        )
    return names


def _numbers(value: Any, low: float, high: float) -> list[float]:
    """Return `value` if it is a list of numbers from `low` to `high`, else an empty list."""
    if not isinstance(value, list):
        return []
    for number in value:
        # The exact type is compared, because a boolean is also an instance of int.
        if type(number) not in (int, float) or not low <= number <= high:
            return []
    return value


def _image_size(value: Any) -> Any:
    sides = value
    if not isinstance(value, list | tuple):
        sides = [value, value]
    is_valid = len(sides) == 2
    for side in sides:
        is_valid = is_valid and type(side) is int and 1 <= side <= LARGEST_SIDE
    if not is_valid:
        raise ValueError(
            f"must be pixels from 1 to {LARGEST_SIDE}, or height and width, as in [224,320]"
        )
    # A square is always stored as a single number, so that equal sizes compare as equal.
    if sides[0] == sides[1]:
        return sides[0]
    return [*sides]


def _fractions(value: Any) -> Any:
    numbers = _numbers(value, 0, 1)
    if not 1 <= len(numbers) <= MOST_CHANNELS:
        raise ValueError(
            "must be a number from 0 to 1 for each channel, as in [0.485, 0.456, 0.406] (of 255: "
            "divide)"
        )
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
        raise ValueError(
            "must be auto, or a number from 1e-06 to 1e+06 for each process, as in [3, 1]"
        )
    return numbers


def _columns(value: Any) -> Any:
    names = _names(value)
    if not names:
        raise ValueError("must be a column's name, or a list of names, as in [age, height]")
    if isinstance(value, list):
        return names
    return names[0]


# Types with two forms have a validator that runs first, because pydantic's messages for a union are
# long. The JSON Schema for editors follows from the types.
_OneName = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
_Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
PixelSize = Annotated[
    _Side | Annotated[list[_Side], Field(min_length=2, max_length=2)], BeforeValidator(_image_size)
]
Fractions = Annotated[list[float], BeforeValidator(_fractions)]
Deviations = Annotated[list[float], BeforeValidator(_deviations)]
PixelRange = Annotated[list[float], BeforeValidator(_black_and_white)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[float, Field(ge=0)]
MicroBatches = Annotated[Literal["auto"] | Positive, BeforeValidator(_count)]
Workers = Annotated[int, Field(ge=0, le=256)]
# The JSON Schema allows integers, because YAML reads the name of a layer such as 4 as a number.
Name = Annotated[str, WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
Names = Annotated[list[Name], Field(min_length=1)]
Columns = Annotated[_OneName | Names, BeforeValidator(_columns)]
Metrics = Annotated[Annotated[list[_OneName], Field(min_length=1)], BeforeValidator(_metrics)]
Cache = Annotated[Literal["off", "disk"], BeforeValidator(_cache)]
# YAML 1.1 reads `off` as False.
Check = Annotated[
    Literal["headers", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]
Cuts = Annotated[Literal["auto"] | Names, BeforeValidator(_cuts)]
Device = Annotated[str, Field(pattern=rf"^({DEVICE})$")]
Devices = Annotated[
    Literal["auto"] | Annotated[list[Device], Field(min_length=1)], BeforeValidator(_devices)
]
Shares = Annotated[
    Literal["auto"] | Annotated[list[int | float], Field(min_length=2)] | None,
    BeforeValidator(_shares),
]
Logger = Annotated[bool | str | None, BeforeValidator(_logger)]
_Blocks = Annotated[int, WithJsonSchema({"type": "integer", "not": {"const": 0}})]
Restart = Annotated[
    bool | Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)],
    BeforeValidator(_restart),
]
Freeze = Annotated[_Blocks | _OneName | Names | None, BeforeValidator(_freeze)]

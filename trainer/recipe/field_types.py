"""Types of the values of recipe keys, with messages for invalid values."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, WithJsonSchema

from trainer.recipe.text import format_value
from trainer.recipe.transform_names import parse_transforms

# Maximum side of an image, in pixels.
LARGEST_SIDE = 2**14
MOST_CHANNELS = 64
# Seconds of each unit of a duration.
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Regular expression of data.fold: number and count of folds, as in 1/5.
FOLD = r"([1-9]\d{0,5})/([1-9]\d{0,5})"
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
        # Other frameworks accept a number of devices. The exact type is compared, because a boolean
        # is also an instance of int.
        if type(value) is int and value > 0:
            count = f"; nproc={value} starts {value} processes"
        raise ValueError(f"must be auto or a list, as in devices=[{example}]{count}")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(DEVICE, name):
            raise ValueError(f"'{format_value(name)}' is not a device: write cpu, cuda or cuda:0")
    return value


def _count(value: Any) -> Any:
    # Compare the exact type, because a boolean is also an instance of int.
    if value != "auto" and not (type(value) is int and value >= 1):
        raise ValueError("must be auto or a number, as in 8")
    return value


def _cache(value: Any) -> Any:
    # YAML 1.1 reads `off` as False and `on` as True, so booleans stand for these words.
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
        # YAML reads the name of a layer of nn.Sequential, such as 3, as a number.
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
    """Return `value` if it is a list of numbers from `low` to `high`, else an empty list.

    Pydantic converts the integers afterwards if the type of the key is a list of floats.
    """
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
    return numbers


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
    return numbers


def _restart(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    numbers = _numbers(value, 1e-9, 1e9)
    if not numbers or sorted({*numbers}) != numbers:
        raise ValueError("must be true, false, or a list of epochs in their order, as in [10, 20]")
    return numbers


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as 90s, 30m, 2h or 1d, or None if it is invalid."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)
    if match is None:
        return None
    return float(match[1]) * SECONDS[match[2]]


def _duration(value: Any) -> Any:
    if value is not None and not parse_duration(str(value)):
        raise ValueError("must be a number above 0 and its unit, as in 90s, 30m, 2h or 1d")
    return value


def _interval(value: Any) -> Any:
    # Compare the exact type, because a boolean is also an instance of int.
    is_count = type(value) is int and value >= 1
    if value is not None and not is_count and not parse_duration(str(value)):
        raise ValueError("must be a number of steps, or a time with its unit, as in 1000 or 30m")
    return value


def _shares(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    numbers = _numbers(value, 1e-6, 1e6)
    if len(numbers) < 2:
        raise ValueError(
            "must be auto, or a number from 1e-06 to 1e+06 for each process, as in [3, 1]"
        )
    return numbers


def _arguments(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be arguments by name, as in {width: 2}")
    for name, argument in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"'{format_value(name)}' is not the name of an argument")
        _check_argument(name, argument)
    return value


def _check_argument(name: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_argument(name, item)
    elif not isinstance(value, bool | int | float | str | None):
        raise ValueError(
            f"{name}={format_value(value)} must be a number, text, true, false, null, or a list"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number")


def _fold(value: Any) -> Any:
    match = re.fullmatch(FOLD, str(value))
    if value is None or (match and int(match[1]) <= int(match[2]) > 1):
        return value
    raise ValueError("must be a fold and the number of folds: 1/5 to 5/5 for five folds")


def _columns(value: Any) -> Any:
    names = _names(value)
    if not names:
        raise ValueError("must be a column's name, or a list of names, as in [age, height]")
    if isinstance(value, list):
        return names
    return names[0]


# Types that accept several forms of a value have a validator that runs before pydantic's checks,
# because pydantic's messages for a union are long. The types still list all forms, because the JSON
# Schema for editors is generated from them.
_OneName = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
_Side = Annotated[int, Field(ge=1, le=LARGEST_SIDE)]
PixelSize = Annotated[
    _Side | Annotated[list[_Side], Field(min_length=2, max_length=2)], BeforeValidator(_image_size)
]
Interpolation = Literal["bilinear", "bicubic", "nearest"]
Fractions = Annotated[list[float], BeforeValidator(_fractions)]
Deviations = Annotated[list[float], BeforeValidator(_deviations)]
PixelRange = Annotated[list[float], BeforeValidator(_black_and_white)]
Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# Share of something, which cannot be nothing.
Share = Annotated[float, Field(gt=0, le=1)]
MicroBatches = Annotated[Literal["auto"] | Positive, BeforeValidator(_count)]
# The JSON Schema allows integers, because YAML reads the name of a layer such as 4 as a number.
Name = Annotated[str, WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
Names = Annotated[list[Name], Field(min_length=1)]
Columns = Annotated[_OneName | Names, BeforeValidator(_columns)]
Fold = Annotated[str | None, BeforeValidator(_fold)]
Metrics = Annotated[list[_OneName], Field(min_length=1), BeforeValidator(_metrics)]
Cache = Annotated[Literal["off", "disk"], BeforeValidator(_cache)]
# YAML 1.1 reads `off` as False, so the validator converts False back.
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
Duration = Annotated[str | None, BeforeValidator(_duration)]
Interval = Annotated[int | str | None, BeforeValidator(_interval)]
Logger = Annotated[bool | str | None, BeforeValidator(_logger)]
_Blocks = Annotated[int, WithJsonSchema({"type": "integer", "not": {"const": 0}})]
Restart = Annotated[
    bool | Annotated[list[PositiveFloat], Field(min_length=1)],
    BeforeValidator(_restart),
]
Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]
Transforms = Annotated[
    list[_OneName | dict[str, Any]],
    BeforeValidator(parse_transforms),
]
Freeze = Annotated[_Blocks | _OneName | Names | None, BeforeValidator(_freeze)]

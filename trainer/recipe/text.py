"""Functions for messages about recipes: format values as users type them, find similar keys."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from trainer.errors import remove_secrets

# Maximum number of characters of a value in a message. Longer values are cut.
MAX_SHOWN = 100
# Minimum similarity, from 0 to 1, of a typo and the name that it stands for. Names that are less
# similar are not suggested.
MIN_SIMILARITY = 0.75
# Keys whose values are arguments of a function, by name. They are values, not sections.
ARGUMENT_KEYS = ("model.args", "optimizer.args")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in ARGUMENT_KEYS:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def with_value(tree: Mapping[Any, Any], path: Sequence[str], value: Any) -> dict[Any, Any]:
    """Return a copy of nested sections in which the key at `path` has this value."""
    name, *rest = path
    if rest:
        value = with_value(tree.get(name, {}), rest, value)
    return {**tree, name: value}


def find_nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to `word`; None if all are too different.

    The section of a key may be missing in `word`.
    """

    def similarity(choice: str) -> float:
        name = choice.lower()
        last_part = name.rpartition(".")[2]
        ratios = []
        for form in {name, last_part}:
            ratios.append(difflib.SequenceMatcher(None, word.lower(), form).ratio())
        return max(ratios)

    best = max(choices, key=similarity, default="")
    if best and similarity(best) >= MIN_SIMILARITY:
        return best
    return None


def format_neighbors(size: int, step: int) -> str:
    """Format the multiples of `step` next to `size`, as in "32 or 48"."""
    below = size // step * step
    above = math.ceil(size / step) * step
    if below:
        return f"{below} or {above}"
    return str(above)


def format_value(value: Any) -> str:
    """Format a value for a message, in at most `MAX_SHOWN` characters."""
    if isinstance(value, list):
        text = f"[{','.join(map(format_value, value))}]"
    elif isinstance(value, Mapping):
        pairs = [f"{key}: {format_value(inner)}" for key, inner in value.items()]
        text = f"{{{', '.join(pairs)}}}"
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    text = " ".join(text.split())
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 3] + "..."
    return text


def list_some(names: Sequence[str], most: int = 4) -> str:
    """Join the first `most` names with commas, followed by the number of all others."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


class _Dumper(yaml.SafeDumper):
    """YAML dumper whose output OmegaConf reads as the same values."""


def _represented(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represented)
# OmegaConf reads 1e3 as a number, but PyYAML takes it for a string. This resolver makes the dumper
# take it for a number, so that it writes the string "1e3" in quotes.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_.]+e[-+]?\d+$", re.I), list("-+.0123456789")
)


def format_yaml_document(value: Any, **options: Any) -> str:
    """Format a value as YAML that is read as the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return text


def format_yaml(value: Any) -> str:
    """Format a value as one line of YAML, as it is typed on the command line or in a file."""
    # The dumper would quote `off`, because YAML 1.1 reads it as false. The quotes are not needed:
    # the keys that have this value accept false for it.
    if value == "off":
        return "off"
    # The infinite width prevents line breaks in long strings.
    return (
        format_yaml_document(value, default_flow_style=True, width=math.inf)
        .removesuffix("...\n")
        .strip()
    )


def explain_unstorable(text: str) -> str | None:
    """Explain why a string cannot be a value, and what to do instead; None if it can."""
    if not text.strip():
        return "write a value, or null"
    if "\0" in text:
        return "it holds a zero byte"
    # Users publish their run folders, which contain the recipe.
    if remove_secrets(text) != text:
        return (
            "a password or token would be written into the files of the run: leave it out of the "
            "address, and put it into the environment (MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, WANDB_API_KEY)"
        )
    if "${" in text:
        return "write the value itself, ${...} is not expanded"
    return not_utf8(text)


def not_utf8(name: str) -> str | None:
    """Explain what to do with a file name that is not UTF-8; None if it is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8: rename it, or make a link to it (ln -s) whose name is"
    return None


def one_line(error: BaseException) -> str:
    """Format an error of a YAML library in one line."""
    # Lines with these starts describe the library's objects, not the user's file.
    noise = ("full_key:", "object_type=", "while constructing", 'in "<unicode')
    parts = []
    for line in str(error).splitlines():
        part = line.strip()
        if part and not part.startswith(noise):
            parts.append(part)
    return "; ".join(parts)[:300] or type(error).__name__

"""Parts of messages about recipes: values as people type them, the nearest key, the nearest sizes."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from trainer.errors import without_secrets


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is with a slip or two, or None; a key may be written without its section."""

    def alike(choice: str) -> tuple[float, int]:
        forms = {choice.lower(), choice.lower().rpartition(".")[2]}
        ratio = max(difflib.SequenceMatcher(None, word.lower(), form).ratio() for form in forms)
        return ratio, next((n for n, pair in enumerate(zip(word, choice, strict=False)) if len({*pair}) > 1), 0)

    best = max(choices, key=alike, default="")
    return best if best and alike(best)[0] >= 0.75 else None


def neighbours(size: int, step: int) -> str:
    """The multiples of `step` around `size`, in words."""
    below, above = size // step * step, math.ceil(size / step) * step
    return f"{below} or {above}" if below else f"{above}"


def shown(value: Any) -> str:
    if isinstance(value, list):
        text = f"[{','.join(map(shown, value))}]"
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


class _Dumper(yaml.SafeDumper):
    """Writes texts so that OmegaConf reads the same."""


def _represented(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"')


_Dumper.add_representer(str, _represented)
# 1e3 is a number to OmegaConf, and a text to YAML's own.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_.]+e[-+]?\d+$", re.I), list("-+.0123456789")
)


def as_yaml(value: Any, **options: Any) -> str:
    """YAML that is read as the same again."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return text


def typed(value: Any) -> str:
    """A value as YAML of one line, as it is typed on the command line or written into a file."""
    if value == "off":  # YAML's false without quotes; a key that has this word takes either
        return "off"
    return as_yaml(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def unstorable(text: str) -> str | None:
    """Why a text cannot be a value: what is wrong with it, and what to do; None where it can."""
    if not text.strip():
        return "write a value, or null"
    if "\0" in text:
        return "it holds a zero byte"
    if without_secrets(text) != text:
        return (
            "a password or token would be written into the files of the run: leave it out of the address, and put it "
            "into the environment (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, WANDB_API_KEY)"
        )
    if "${" in text:
        return "write the value itself, ${...} is not expanded"
    return not_utf8(text)


def not_utf8(name: str) -> str | None:
    """What to do with a file's name that no text can hold; None for other names."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8: rename it, or make a link to it (ln -s) whose name is"
    return None


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    noise = ("full_key:", "object_type=", "while constructing", 'in "<unicode')
    kept = [line for line in lines if line and not line.startswith(noise)]
    return "; ".join(kept)[:300] or type(error).__name__

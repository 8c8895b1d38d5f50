"""Amounts of memory and speeds of exchange, as people write and read them: 24GiB, 10GB/s."""

from __future__ import annotations

import re

from trainer.errors import RecipeError

UNITS = {f"{prefix}{i}B": (1024 if i else 1000) ** power for power, prefix in enumerate("KMGT", 1) for i in ("i", "")}
BITS = {f"{prefix}bit": 1000**power / 8 for power, prefix in enumerate("KMGT", 1)}


def parse_memory(word: str) -> int:
    """Bytes of `memory=24GiB`.

    Raises:
        RecipeError: no amount, or no unit.
    """
    return int(_amount("memory", word, UNITS, "24GiB", "GiB, GB, MiB or MB"))


def parse_bandwidth(word: str) -> float:
    """Bytes a second of `bandwidth=10GB/s`.

    Raises:
        RecipeError: no amount, or no unit.
    """
    units = {f"{unit}/s": scale for unit, scale in {**UNITS, **BITS}.items()}
    return _amount("bandwidth", word, units, "10GB/s", "GB/s, GiB/s, MB/s or Gbit/s")


def _amount(key: str, word: str, units: dict[str, float], example: str, listed: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([A-Za-z/]*)", word)
    names = {unit.lower(): unit for unit in units}
    unit = names.get(match[2].lower()) if match else None
    if match is None or (match[2] and unit is None):
        raise RecipeError(f"{key}={word[:40]} is not an amount: write {key}={example}, in {listed}")
    if unit is None:
        wanted = example.lstrip("0123456789")
        raise RecipeError(f"{key}={word} has no unit: write {key}={word}{wanted}, in {listed}")
    amount = float(match[1]) * units[unit]
    if amount < 1:
        raise RecipeError(f"{key}={word} must be above 0, as in {key}={example}")
    return amount


def operations(count: float) -> str:
    """Floating point operations for people."""
    for unit in ("FLOP", "KFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TFLOP"


def multiply_adds(count: float) -> str:
    """The same as papers and torchvision count them, a multiplication and its addition as one: 4.09 GMACs."""
    return operations(count / 2).replace("FLOP", "MACs")

"""`python -m trainer prove`: whether this machine trains right, and how fast.

Right before fast, the most telling first, within the minutes that are given. What is done is kept, and the same words
go on after a stop. It composes what the rooms below measure, and every run is one of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.commands.prove.check_runner import Devices
from trainer.devices import cards
from trainer.devices.assignment import present
from trainer.errors import RecipeError, SetupError
from trainer.processes import resources
from trainer.processes.rank import place
from trainer.recipe.recipe_files import split_words

WORDS = ("minutes", "output", "devices")
MINUTES = "10"
CPU_PROCESSES = 2


def command(words: Sequence[str]) -> int:
    """0 where all that was checked is right, 3 where something is wrong.

    Raises:
        RecipeError: words that mean nothing.
        FolderInUseError: output= holds something else.
        Interrupted, Preempted: stopped; what was done is kept.
    """
    options, rest = split_words(words, WORDS)
    if rest:
        raise RecipeError(f"'{rest[0][:80]}' is not a word of prove: type minutes=10, devices=[...] or output=FOLDER")
    if place().launched:
        raise RecipeError("prove starts its processes itself: type python -m trainer prove without torchrun")
    minutes = options.get("minutes", MINUTES)
    if not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", minutes) or not 0 < float(minutes) <= 1440:
        raise RecipeError(f"minutes={minutes[:40]} must be a number up to 1440, as in minutes=10")
    devices = find_devices(options.get("devices"))
    from trainer.commands.prove import proving  # with torch, which a wrong word need not wait for

    return SetupError.code if proving.prove(devices, float(minutes), options.get("output")) == "wrong" else 0


def find_devices(text: str | None) -> Devices:
    """Those that the words name: by default every GPU, else CPU processes. Raises RecipeError, SetupError."""
    here = cards.detect()
    if text is None or text == "auto":
        if here.fault is not None:
            raise here.fault
        names = [f"cuda:{n}" for n in range(here.count)] or ["cpu"] * CPU_PROCESSES
    else:
        names = present([name.strip() for name in text.strip("[]").split(",") if name.strip()], here.count)
        if not names or len({name.partition(":")[0] for name in names}) > 1:
            raise RecipeError(f"devices={text[:80]} must be GPUs or CPU processes, as in devices=[cpu,cpu]")
        if names[0] != "cpu" and len(set(names)) < len(names):
            raise RecipeError(f"devices={text[:80]} names a card twice: name each once")
    if names[0] == "cpu":
        return Devices(tuple(names), "cpu", ("CPU",) * len(names), max(1, resources.cores() // len(names)))
    import torch

    return Devices(tuple(names), "cuda", tuple(torch.cuda.get_device_name(name) for name in names))

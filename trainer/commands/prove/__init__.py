"""The command `prove`: check that this machine trains correctly, and measure how fast.

Checks of correctness come before measurements of speed. If the minutes that the user allows are not
enough for all checks, the most important ones run. Finished checks are kept, and the same command
resumes after a stop. All training runs are started through the command line, as a user would start
them.
"""

import re
from collections.abc import Sequence

from trainer.commands.prove.check_runner import Devices
from trainer.devices import cards
from trainer.devices.assignment import resolve_devices
from trainer.errors import RecipeError, SetupError
from trainer.processes import resources
from trainer.processes.rank import read_place
from trainer.recipe import split_arguments

OWN_ARGUMENTS = ("minutes", "output", "devices")
MINUTES = "10"
CPU_PROCESSES = 2


def command(words: Sequence[str]) -> int:
    """Run `python -m trainer prove` with the arguments `words`.

    Returns:
        0 if everything that was checked is right, 3 if something is wrong.

    Raises:
        RecipeError: an argument is not allowed.
        FolderInUseError: the folder of output= holds something else, or a proof of another machine,
            other versions or other devices, or another process uses it.
        Interrupted, Preempted: stopped by a signal; finished checks are kept.
    """
    options, unknown = split_arguments(words, OWN_ARGUMENTS)
    if unknown:
        raise RecipeError(
            f"'{unknown[0][:80]}' is not an argument of prove: type minutes=10, devices=[...] or "
            "output=FOLDER"
        )
    if read_place().launched:
        raise RecipeError(
            "prove starts its processes itself: type python -m trainer prove without torchrun"
        )
    minutes = options.get("minutes", MINUTES)
    if not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", minutes) or not 0 < float(minutes) <= 1440:
        raise RecipeError(f"minutes={minutes[:40]} must be a number up to 1440, as in minutes=10")
    devices = find_devices(options.get("devices"))
    # This imports torch, which takes seconds, so check the arguments first.
    from trainer.commands.prove import proving

    if proving.prove(devices, float(minutes), options.get("output")) == "wrong":
        return SetupError.code
    return 0


def find_devices(text: str | None) -> Devices:
    """Return the devices to check.

    Args:
        text: value of `devices=`. None or "auto": all GPUs, or CPU processes if there is no GPU.

    Raises:
        RecipeError: `text` names a device that is not here, a GPU twice, or both GPUs and CPUs.
        SetupError: a GPU is here but does not work.
    """
    detected = cards.detect()
    if text in (None, "auto"):
        if detected.fault:
            raise detected.fault
        names = resolve_devices("auto", detected.count) or ["cpu"] * CPU_PROCESSES
    else:
        stripped = [name.strip() for name in text.strip("[]").split(",")]
        names = resolve_devices(list(filter(None, stripped)), detected.count)
        if not names or len({name.partition(":")[0] for name in names}) > 1:
            raise RecipeError(
                f"devices={text[:80]} must be GPUs or CPU processes, as in devices=[cpu,cpu]"
            )
        if names[0] != "cpu" and len(set(names)) < len(names):
            raise RecipeError(f"devices={text[:80]} names a card twice: name each once")
    if names[0] == "cpu":
        threads = max(1, resources.count_cores() // len(names))
        return Devices(tuple(names), "cpu", ("CPU",) * len(names), threads)
    import torch

    return Devices(tuple(names), "cuda", tuple(map(torch.cuda.get_device_name, names)))

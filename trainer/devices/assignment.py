"""Decide which devices each process uses, and check that they exist and suit the mode."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.recipe.field_types import DEVICE


def assign_devices(
    recipe: Recipe, local_size: int, cuda: int, nodes: int = 1
) -> list[tuple[str, ...]]:
    """Return the devices of each local rank.

    Each rank gets one device, with one exception: in a mode whose single process uses several
    devices, that process gets all devices, or one device for each stage of a staged model. Several
    ranks or stages can share the CPU. Workers of local SGD can also share a GPU.

    Args:
        recipe: The recipe.
        local_size: Number of ranks on this machine.
        cuda: Number of GPUs on this machine.
        nodes: Number of machines. With several machines, a run has several processes even if
            `local_size` is 1.

    Raises:
        RecipeError: A device does not exist, or the mode cannot use these devices.
    """
    names = named_devices(recipe, cuda)
    if recipe.traits.many_devices and local_size == nodes == 1:
        return [_assign_to_one_process(recipe, names)]
    if recipe.traits.shared_memory and any(name != "cpu" for name in names):
        raise RecipeError(
            f"mode={recipe.mode} shares its weights in the CPU's memory: leave devices out, or "
            "write devices=[cpu]; several workers on one card: mode=local_sgd devices=[cuda:0]"
        )
    if recipe.traits.shares_devices or names == ["cpu"]:
        return [(names[rank % len(names)],) for rank in range(local_size)]
    if local_size > len(names):
        raise RecipeError(
            f"{local_size} processes for {len(names)} device{_plural(names)} "
            f"({', '.join(names)}): use nproc={len(names)} (torchrun's "
            f"--nproc_per_node={len(names)}); mode={recipe.mode} needs one for each"
        )
    if local_size < len(names) and recipe.devices != "auto":
        if recipe.traits.single_device:
            remedy = "mode=ddp"
        else:
            remedy = f"nproc={len(names)}"
        raise RecipeError(
            f"devices lists {len(names)}, but mode={recipe.mode} uses one for each process, and "
            f"nproc={local_size}: use {remedy}, or list {local_size}"
        )
    return [(name,) for name in names[:local_size]]


def _plural(names: Sequence[str]) -> str:
    return "" if len(names) == 1 else "s"


def count_named_cards(devices: Sequence[str]) -> int:
    """Return the number of GPUs that a machine needs to have all of `devices`.

    Args:
        devices: Names of devices, such as cuda:0 or, for the first GPU, cuda.
    """
    counts = [0]
    for name in devices:
        if name != "cpu":
            counts.append(1 + int(name.partition(":")[2] or 0))
    return max(counts)


def named_devices(recipe: Recipe, cuda: int) -> list[str]:
    """Return the devices that the recipe lists, or all GPUs of the machine for devices=auto.

    The result is ["cpu"] if the recipe lists no device. For devices=auto, it is also ["cpu"] if the
    machine has no GPU, or if the processes share weights in the CPU's memory.

    Raises:
        RecipeError: A name is invalid, or this machine does not have the device.
    """
    if recipe.devices == "auto" and recipe.traits.shared_memory:
        return ["cpu"]
    return resolve_devices(recipe.devices, cuda) or ["cpu"]


def prediction_devices(
    devices: Sequence[str] | Literal["auto"], cuda: int, cores: int
) -> list[str]:
    """Return the device of each prediction worker. For `auto`, there is one worker for each GPU.

    Without a GPU, `auto` means one CPU worker for each core, but at most eight.

    Raises:
        RecipeError: A device does not exist, or the list is empty.
    """
    if devices == "auto" and not cuda:
        return ["cpu"] * min(8, cores)
    names = resolve_devices(devices, cuda)
    if not names:
        raise RecipeError(
            "devices=[] names none: write devices=auto, or a device for each worker, as "
            "devices=[cuda:0,cpu]"
        )
    return names


def resolve_devices(devices: Sequence[str] | Literal["auto"], cuda: int) -> list[str]:
    """Return the full names of `devices`. For "auto", these are all GPUs.

    Raises:
        RecipeError: A name is invalid, or this machine does not have the device.
    """
    if devices == "auto":
        return [f"cuda:{index}" for index in range(cuda)]
    names = ["cuda:0" if str(name) == "cuda" else str(name) for name in devices]
    for name in names:
        if not re.fullmatch(DEVICE, name):
            raise RecipeError(f"devices: {name} is not a device; write cpu, cuda:0 or cuda:1")
    for name in names:
        if name != "cpu" and int(name.partition(":")[2]) >= cuda:
            existing = "no CUDA device"
            remedy = "[cpu]"
            if cuda:
                existing = "cuda:0" if cuda == 1 else f"cuda:0 to cuda:{cuda - 1}"
                remedy = "[cuda:0]"
            raise RecipeError(
                f"devices: {name} is not here, this machine has {existing}; write devices={remedy}"
            )
    return names


def _assign_to_one_process(recipe: Recipe, names: list[str]) -> tuple[str, ...]:
    """Return the devices of a run's only process: all `names`, or one for each stage of the model.

    For a staged model on the CPU, the result has one "cpu" for each stage. With devices=auto, GPUs
    that exceed the number of stages stay unused.

    Raises:
        RecipeError: The model is staged, and it has only one GPU, or the number of devices differs
            from the number of stages.
    """
    if not recipe.traits.staged:
        return tuple(names)
    stages = recipe.pipeline.stages
    if names == ["cpu"]:
        return ("cpu",) * (stages or 2)
    if recipe.devices == "auto" and stages:
        names = names[:stages]
    if len(names) < 2 or len(names) != (stages or len(names)):
        needed = stages or 2
        repeated = ",".join((names * needed)[:needed])
        remedy = f"write devices=[{repeated}]"
        if len(names) > 1:
            remedy += f" or pipeline.stages={len(names)}"
        raise RecipeError(
            f"mode={recipe.mode} puts a stage on each device: {needed} stages for {len(names)} "
            f"device{_plural(names)} ({', '.join(names)}); {remedy}"
        )
    return tuple(names)


def number_devices(devices: Iterable[object]) -> Iterator[str]:
    """Yield a unique name for each device in a list.

    A device can occur several times, because ranks, stages or workers share it. Its name then ends
    with the position in the list: cuda:0#1, or cpu:1 for the CPU.
    """
    names = list(map(str, devices))
    for position, name in enumerate(names):
        if names.count(name) == 1:
            yield name
        elif name == "cpu":
            yield f"{name}:{position}"
        else:
            yield f"{name}#{position}"

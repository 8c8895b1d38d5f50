"""Which devices each process drives: a pure function of the recipe, the ranks here and the GPUs here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from trainer.errors import RecipeError
from trainer.recipe import DEVICE, Recipe


def assign_devices(recipe: Recipe, local_size: int, cuda: int, nodes: int = 1) -> list[tuple[str, ...]]:
    """The devices that each local rank drives: one, or all in a mode of one process and several devices.

    `nodes` is the number of machines; a process alone on each of several is one of many.

    Without a GPU, CPU stand-ins take the place of a split model's devices. Workers of local SGD may share a device.

    Raises:
        RecipeError: devices that are not here, or another number than the mode can use, with the number that works.
    """
    names = named_devices(recipe, cuda)
    if recipe.traits.many_devices and local_size == nodes == 1:
        return [_of_one_process(recipe, names)]
    if recipe.traits.shared_memory and any(name != "cpu" for name in names):
        raise RecipeError(
            f"mode={recipe.mode} shares its weights in the CPU's memory: leave devices out, or write devices=[cpu]; "
            "several workers on one card: mode=local_sgd devices=[cuda:0]"
        )
    if recipe.traits.shares_devices or names == ["cpu"]:
        return [(names[rank % len(names)],) for rank in range(local_size)]
    if local_size > len(names):
        raise RecipeError(
            f"{local_size} processes for {len(names)} device{'s' * (len(names) > 1)} ({', '.join(names)}): "
            f"use nproc={len(names)} (torchrun --nproc_per_node={len(names)}); mode={recipe.mode} needs one for each"
        )
    if local_size < len(names) and recipe.devices != "auto":
        how = "mode=ddp" if recipe.traits.single_device else f"nproc={len(names)}"
        raise RecipeError(
            f"devices lists {len(names)} for {local_size} process{'es' * (local_size > 1)}, and mode={recipe.mode} "
            f"uses one each: use {how}, or list {local_size}"
        )
    return [(name,) for name in names[:local_size]]


def named_devices(recipe: Recipe, cuda: int) -> list[str]:
    """The recipe's devices, or those there are."""
    if recipe.devices == "auto":
        return [f"cuda:{index}" for index in range(cuda)] if cuda and not recipe.traits.shared_memory else ["cpu"]
    return present(recipe.devices, cuda)


def prediction_devices(devices: Sequence[str] | Literal["auto"], cuda: int, cores: int) -> list[str]:
    """The devices of prediction workers, one each: those that are named, or every GPU.

    Without a GPU, `auto` is a CPU worker for each of the cores, eight at most.

    Raises:
        RecipeError: devices that are not here, or none.
    """
    if devices == "auto" and not cuda:
        return ["cpu"] * max(1, min(8, cores))
    names = [f"cuda:{index}" for index in range(cuda)] if devices == "auto" else present(devices, cuda)
    if not names:
        raise RecipeError("devices=[] names none: write devices=auto, or a worker each, as devices=[cuda:0,cpu]")
    return names


def present(devices: Sequence[str], cuda: int) -> list[str]:
    """The devices under their full names. Raises RecipeError where one is not here."""
    names = ["cuda:0" if str(name) == "cuda" else str(name) for name in devices]
    odd = next((name for name in names if not re.fullmatch(DEVICE, name)), None)
    if odd is not None:
        raise RecipeError(f"devices: {odd} is not a device; write cpu, cuda:0 or cuda:1")
    absent = [name for name in names if name != "cpu" and int(name.partition(":")[2]) >= cuda]
    if absent:
        have = f"cuda:0 to cuda:{cuda - 1}" if cuda > 1 else "cuda:0" if cuda else "no CUDA device"
        raise RecipeError(
            f"devices: {absent[0]} is not here, this machine has {have}; "
            f"write devices={'[cuda:0]' if cuda else '[cpu]'}"
        )
    return names


def _of_one_process(recipe: Recipe, names: list[str]) -> tuple[str, ...]:
    """All devices of a mode that runs in one process; a stage each where the model is split."""
    if not recipe.traits.staged:
        return tuple(names)
    stages = recipe.pipeline.stages
    if names == ["cpu"]:
        return ("cpu",) * (stages or 2)
    if recipe.devices == "auto" and stages and len(names) > stages:
        names = names[:stages]
    if len(names) < 2 or len(names) != (stages or len(names)):
        want = stages or 2
        twice = ",".join((names * want)[:want])
        raise RecipeError(
            f"mode={recipe.mode} puts a stage on each device: {want} stages for {len(names)} device"
            f"{'s' * (len(names) > 1)} ({', '.join(names)}); write devices=[{twice}]"
            + (f" or pipeline.stages={len(names)}" if len(names) > 1 else "")
        )
    return tuple(names)


def numbered(devices: Iterable[object]) -> Iterator[str]:
    """Names of the devices that one process drives, different for each: stand-ins on one device get a number."""
    names = list(map(str, devices))
    for position, name in enumerate(names):
        yield name if names.count(name) == 1 else f"{name}:{position}" if name == "cpu" else f"{name}#{position}"

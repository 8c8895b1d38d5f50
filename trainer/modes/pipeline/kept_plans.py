"""Pipelines that were measured on this machine, kept for runs of the same model on the same devices.

~/.cache/trainer/pipelines/<model>-<hash of all that a plan depends on>.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from trainer.data.downloads import data_folder
from trainer.devices.host import processor
from trainer.errors import TrainerError
from trainer.modes.base import Context
from trainer.recipe import DataRecipe
from trainer.saving.files import write_atomically


def file_for(context: Context, model: nn.Module, key: str) -> Path:
    """Where the plan of a pipeline with this `tuning.key_of` is kept. Collective: it is for all ranks' devices."""
    recipe, world = context.recipe, context.world
    cards = [torch.cuda.get_device_name(device) for device in world.drives if device.type == "cuda"]
    machines = world.broadcast_object(world.gather((processor(), world.name, cards, torch.get_num_threads())))
    named = model.named_parameters(remove_duplicate=False)
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in named]
    options = (recipe.compile, recipe.channels_last, recipe.deterministic, recipe.pipeline.deferred_batch_norm)
    asked = repr((key, machines, torch.__version__, context.example, type(context.task).__name__, tensors, options))
    name = f"{re.sub(r'[^a-zA-Z0-9_.-]', '-', recipe.model.name)}-{xxhash.xxh3_64_hexdigest(asked.encode())}.json"
    return data_folder(DataRecipe()) / "pipelines" / name


def write(path: Path, known: Mapping[str, Any]) -> None:
    """Keep what was measured, where this user's folder can be written."""
    with suppress(OSError, TrainerError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known))

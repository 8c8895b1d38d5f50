"""Weights by plain name, in files for users: last.safetensors and best.safetensors, and whatever holds weights."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.recipe.text import not_utf8
from trainer.saving.checkpoint import checkpoints_in, is_checkpoint, load
from trainer.saving.files import put, remove, writing
from trainer.saving.tensor_files import StoredTensor, fault_point, mapped, serialised, sync, write_synced


def save_weights(
    path: Path,
    tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor],
    metadata: dict[str, str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a .safetensors file for users, atomically: the name always holds a whole file. `check` is as of `commit`.

    Raises:
        DiskFullError, SetupError: as `commit`; the file that was there before is intact.
    """
    write_whole(path, serialised(tensors, {"format": "pt", **metadata}), "weights", check=check)


def write_whole(
    path: Path,
    content: Iterable[memoryview],
    where: str,
    again: str = "resume=auto",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a file, and only then give it its name. `where` is for faults; `again` and `check` as of `writing` and
    `commit`, which say what is raised."""
    draft = path.with_name(f".{path.name}.tmp")
    with writing(path.parent, again):
        remove(draft)  # of a writer that died, or whatever else has the name
        try:
            write_synced(draft, content, where)
            fault_point("rename", where)
            check()
            put(draft, path)
            sync(path.parent)
        finally:
            remove(draft)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights by plain name on the CPU, and the file's metadata.

    `path` is a .safetensors file, a run folder (its last.safetensors), a checkpoint folder (its averaged weights where
    it has them; metadata "weights" is "ema" or "model"), or a .pt or .pth file of tensors; pickled code is never run.

    Raises:
        CheckpointError: nothing usable there; says what to give.
    """
    wanted = "give a run folder, a checkpoint folder, or a .safetensors, .pt or .pth file of weights"
    file = path
    try:
        if path.is_dir():
            if is_checkpoint(path):
                state = load(path)
                model, ema = state.part("model"), state.part("ema")
                at = {"step": str(state.position.step), "epoch": str(state.position.epoch)}
                tensors = {name: tensor.read() for name, tensor in {**model, **ema}.items()}
                return tensors, {"format": "pt", "weights": "ema" if ema else "model", **at}
            file = path / "last.safetensors"
        if not file.is_file():
            if runs := sorted(path.glob("*/last.safetensors"), key=os.path.getmtime):
                raise CheckpointError(f"{path} holds runs and is none: give one, the newest is {runs[-1].parent}")
            have = checkpoints_in(path / "checkpoints")
            raise CheckpointError(f"{file} is not there; {f'give {have[0]}' if have else wanted}")
        if file.suffix in (".pt", ".pth"):
            return _unpickled(file), {}
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file} is not a kind of file that is read here; {wanted}")
        with safe_open(file, "pt") as whole:  # before anything as large as the file says is allocated
            metadata = whole.metadata() or {}
        return mapped(file), metadata
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}); {wanted}") from error
    except (ValueError, SafetensorError) as error:
        if fault := not_utf8(str(file)):
            raise CheckpointError(f"{file} cannot be read: {fault}") from None
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}); {wanted}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """What the weights of a run folder or a .safetensors file hold as metadata; empty where there is none.

    Of a checkpoint's folder it is that of its run.
    """
    inner = path.is_dir() and is_checkpoint(path)
    folders = [path, *path.absolute().parents[:2]] if inner else [path]
    file = next((there for folder in folders if (there := folder / "last.safetensors").is_file()), path)
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, "pt") as whole:
            return whole.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Tensors of a .pt file: a state dict, or the one under "model" or "state_dict", where training scripts put it."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as whole:  # torch stores tensors as they are: what unpacks to more is a bomb
                if sum(entry.file_size for entry in whole.infolist()) > file.stat().st_size:
                    raise ValueError("compressed")
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises about anything here
        advice = "nothing in it was executed; save the model's state_dict() with safetensors.torch.save_file, give that"
        raise CheckpointError(f"{file} is not a file of plain tensors ({type(error).__name__}); {advice}") from None
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} holds no dictionary of tensors; give a file with a model's state_dict()")
    return {str(name): tensor for name, tensor in content.items()}

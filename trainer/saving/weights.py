"""Read and write weights files, such as last.safetensors and best.safetensors of a run."""

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
from trainer.saving.files import remove, replace_file, report_write_errors
from trainer.saving.tensor_files import (
    StoredTensor,
    fault_point,
    map_tensors,
    serialize,
    sync,
    write_synced,
)


def save_weights(
    path: Path,
    tensors: Mapping[str, Tensor] | Mapping[str, StoredTensor],
    metadata: dict[str, str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a .safetensors file atomically: a file at `path` is always complete.

    Args:
        path: path of the file.
        tensors: weights by name.
        metadata: further entries of the file's header, strings by name.
        check: called before the draft is renamed to `path`; raises if nothing may be saved.

    Raises:
        DiskFullError, SetupError: see `report_write_errors`. An older file at `path` is unchanged.
    """
    write_whole(path, serialize(tensors, {"format": "pt", **metadata}), "weights", check=check)


def write_whole(
    path: Path,
    content: Iterable[memoryview],
    where: str,
    again: str = "resume=auto",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a file under a temporary name, and rename it when it is complete.

    Args:
        path: path of the file.
        content: bytes of the file.
        where: name of the writer in `TRAINER_FAULT`, with which tests inject faults.
        again: what to type after freeing space on the disk.
        check: called before the draft is renamed to `path`; raises if nothing may be saved.

    Raises:
        DiskFullError, SetupError: see `report_write_errors`. An older file at `path` is unchanged.
    """
    draft = path.with_name(f".{path.name}.tmp")
    with report_write_errors(path.parent, again):
        # A writer that was killed may have left a draft.
        remove(draft)
        try:
            write_synced(draft, content, where)
            fault_point("rename", where)
            check()
            replace_file(draft, path)
            sync(path.parent)
        finally:
            remove(draft)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read weights to the CPU.

    Args:
        path: a .safetensors file, a run folder (reads its last.safetensors), a checkpoint folder
            (reads its averaged weights, or else those of the model), or a .pt or .pth file of
            tensors. Code in pickled files is not executed.

    Returns:
        (weights, metadata): the weights by name, and the metadata of the file. For a checkpoint,
        the entry "weights" of the metadata is "ema" or "model".

    Raises:
        CheckpointError: no weights can be read. The message says which paths are accepted.
    """
    advice = (
        "give a run folder, a checkpoint folder, or a .safetensors, .pt or .pth file of weights"
    )
    file = path
    try:
        if path.is_dir():
            if is_checkpoint(path):
                state = load(path)
                averages = state.part("ema")
                # The moving averages, if any, replace the model's tensors of the same names.
                stored = state.part("model") | averages
                metadata = {
                    "format": "pt",
                    "weights": "ema" if averages else "model",
                    "step": str(state.position.step),
                    "epoch": str(state.position.epoch),
                }
                return {name: tensor.read() for name, tensor in stored.items()}, metadata
            file = path / "last.safetensors"
        if not file.is_file():
            runs = sorted(path.glob("*/last.safetensors"), key=os.path.getmtime)
            if runs:
                raise CheckpointError(
                    f"{path} holds runs and is none: give one, the newest is {runs[-1].parent}"
                )
            checkpoints = checkpoints_in(path / "checkpoints")
            if checkpoints:
                advice = f"give {checkpoints[0]}"
            raise CheckpointError(f"{file} is not there; {advice}")
        if file.suffix in (".pt", ".pth"):
            return _read_pickled(file), {}
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file} is not a kind of file that is read here; {advice}")
        return map_tensors(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror or error}); {advice}"
        ) from error
    except ValueError as error:
        fault = not_utf8(str(file))
        if fault:
            raise CheckpointError(f"{file} cannot be read: {fault}") from None
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({error}); {advice}"
        ) from error


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a weights file.

    Args:
        path: a .safetensors file, a run folder (reads its last.safetensors), or a checkpoint folder
            (reads the last.safetensors of its run).

    Returns:
        The metadata, which is empty if it cannot be read.
    """
    folders = [path]
    if path.is_dir() and is_checkpoint(path):
        folders += path.absolute().parents[:2]
    file = path
    for folder in folders:
        if (folder / "last.safetensors").is_file():
            file = folder / "last.safetensors"
            break
    if file.suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, "pt") as weights:
            return weights.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Read a .pt file that contains a state dict.

    Training scripts often save the state dict under the key "model" or "state_dict".
    """
    try:
        if zipfile.is_zipfile(file):
            # torch does not compress tensors. A file that unpacks to more bytes than it has may be
            # a zip bomb, so it is refused.
            with zipfile.ZipFile(file) as archive:
                unpacked_size = sum(entry.file_size for entry in archive.infolist())
                if unpacked_size > file.stat().st_size:
                    raise ValueError("compressed")
        content = torch.load(file, map_location="cpu", weights_only=True)
    # torch raises many types of exceptions for damaged files.
    except Exception as error:
        advice = (
            "nothing in it was executed; save the model's state_dict() with "
            "safetensors.torch.save_file, give that"
        )
        raise CheckpointError(
            f"{file} is not a file of plain tensors ({type(error).__name__}); {advice}"
        ) from None
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    is_state_dict = isinstance(content, dict) and content
    if not is_state_dict or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{file} holds no dictionary of tensors; give a file with a model's state_dict()"
        )
    return {str(name): tensor for name, tensor in content.items()}

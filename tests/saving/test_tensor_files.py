"""Tensors as files: finite ones are written, hostile bytes are refused."""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path

import pytest
import torch

from tests.saving.states import commit, make, one_line
from trainer.errors import CheckpointError, NotFiniteError
from trainer.saving import checkpoint
from trainer.saving.checkpoint import load
from trainer.saving.tensor_files import require_finite
from trainer.saving.weights import read_weights


@pytest.mark.parametrize("stem", ["model", "ema", "optimizer"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_that_are_not_finite_are_named(stem: str, value: float) -> None:
    with pytest.raises(NotFiniteError, match=rf"bn\.running_var \({stem}\)"):
        require_finite(stem, {"bn.running_var": torch.tensor([1.0, value, 2.0])})


def _tensors(header: str, data: bytes = bytes(8)) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def _entry(shape: str = "[2]", offsets: str = "[0,8]", dtype: str = "F32") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


HOSTILE = {
    "a header longer than the file": (2**62).to_bytes(8, "little") + b"{}",
    "a header of a gigabyte": (2**30).to_bytes(8, "little") + b"{" * 100,
    "nested deep": _tensors("[" * 50_000),
    "a shape that overflows": _tensors(f'{{"w":{_entry("[4294967296,4294967296,2]")}}}'),
    "nothing, endlessly wide": _tensors(
        f'{{"w":{_entry("[0,9223372036854775807,8]", "[0,0]")}}}', b""
    ),
    "overlapping": _tensors(f'{{"v":{_entry()},"w":{_entry()}}}'),
    "a hole": _tensors(
        f'{{"v":{_entry(offsets="[0,8]")},"w":{_entry(offsets="[16,24]")}}}', bytes(24)
    ),
    "offsets the wrong way round": _tensors(f'{{"w":{_entry(offsets="[8,0]")}}}'),
    "metadata that is no text": _tensors(f'{{"__metadata__":{{"recipe":[1]}},"w":{_entry()}}}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_safetensors_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(HOSTILE[kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"w\.safetensors .*safetensors file") as caught:
        read_weights(tmp_path / "w.safetensors")
    assert len(one_line(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"
    path = commit(tmp_path, make(1), keep=2)  # the same behind a manifest that vouches for it
    (path / "model.safetensors").write_bytes(HOSTILE[kind])
    content = json.loads((path / "manifest.json").read_text())
    content.pop("sha256")
    content["files"]["model.safetensors"] = {
        "size": len(HOSTILE[kind]),
        "sha256": hashlib.sha256(HOSTILE[kind]).hexdigest(),
    }
    (path / "manifest.json").write_bytes(checkpoint._serialize_manifest(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*safetensors file"):
        load(path)

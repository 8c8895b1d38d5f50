"""One function a format: writes the model and what is to know of it, and gives back what runs the file."""

from __future__ import annotations

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.commands.export.export_source import ExportSource
from trainer.models.zoo import initialise
from trainer.saving.tensor_files import require_finite, serialised, write_synced
from trainer.saving.weights import read_weights

Runner = Callable[[Tensor], Tensor]
FACTS = "trainer.json"  # a further file in those of torch; in ONNX, which holds texts by name, one of them
ONE_FILE = 1.9e9  # bytes that protobuf can hold, and some room: an ONNX file with more has its weights beside it


def to_onnx(source: ExportSource, path: Path) -> Runner:
    """An ONNX file; the facts are its metadata, each as a text and all of them as trainer.json."""
    with quietly():
        exported: Any = torch.onnx.export(
            _program(source), (), dynamo=True, verbose=False, input_names=["input"], output_names=["output"]
        )
        exported.model.metadata_props.update({**source.texts(), FACTS: _as_json(source)})
        size = sum(tensor.numel() * tensor.element_size() for tensor in source.tensors.values())
        exported.save(path, external_data=size > ONE_FILE)
    del exported
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])


def to_exported_program(source: ExportSource, path: Path) -> Runner:
    """A file of torch.export; the facts are a further file in it, trainer.json."""
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(_program(source), buffer, extra_files={FACTS: _as_json(source)})
        _write(buffer, path)
        runner: Runner = torch.export.load(path).module()
    return runner


def to_torchscript(source: ExportSource, path: Path) -> Runner:
    """A traced module; the facts are a further file in it, trainer.json."""
    with quietly():
        traced: Any = torch.jit.trace(source.model, source.sample(2), check_trace=False)  # type: ignore[no-untyped-call]
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer, _extra_files={FACTS: _as_json(source)})
        _write(_without_debugging(buffer), path)
        runner: Runner = torch.jit.load(path)  # type: ignore[no-untyped-call]
    return runner


def to_safetensors(source: ExportSource, path: Path) -> Runner:
    """The weights alone under plain names, with the facts as metadata; predict and evaluate take the file.

    Metadata of the weights' file goes first: its `model` is the call that makes the bare one, where there is one.
    """
    recipe = json.dumps(source.recipe.for_others())
    require_finite(path.name, source.tensors)
    facts = {"format": "pt", **source.texts(), **source.metadata, "recipe": recipe}
    write_synced(path, serialised(source.tensors, facts), "export")
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}

    def run(inputs: Tensor) -> Tensor:
        initialise(source.model, read_weights(path)[0], str(path), whole=True)
        outputs: Tensor = source.model(inputs)
        source.model.load_state_dict(before)
        return outputs

    return run


WRITERS: dict[str, Callable[[ExportSource, Path], Runner]] = {
    "onnx": to_onnx,
    "exported_program": to_exported_program,
    "torchscript": to_torchscript,
    "safetensors": to_safetensors,
}


def _write(buffer: io.BytesIO, path: Path) -> None:
    """torch's own writer ends the process where the disk is full: it has the file in memory, and we write it."""
    write_synced(path, [buffer.getbuffer()], "export")


def _as_json(source: ExportSource) -> str:
    return json.dumps(dict(source.facts), indent=1)


def _program(source: ExportSource) -> torch.export.ExportedProgram:
    """The model as a graph for any number of samples, without the paths of its code on this machine."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(source.model, (source.sample(2),), dynamic_shapes=({0: batch},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _without_debugging(made: io.BytesIO) -> io.BytesIO:
    """A TorchScript file without the lines of source, with their paths, that each operation came from."""
    bare = io.BytesIO()
    with zipfile.ZipFile(made) as whole, zipfile.ZipFile(bare, "w") as kept:
        for entry in whole.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                kept.writestr(entry.filename, whole.read(entry))
    return bare


@contextmanager
def quietly() -> Iterator[None]:
    """Without the libraries' own words: of deprecations, of every operator, of graphs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

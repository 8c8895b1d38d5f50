"""What is exported, one function a format, comparing the file's outputs with the model's, and the lines that say so."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import TensorSpec
from trainer.errors import CheckpointError, RecipeError, TrainerError, is_out_of_memory, text_of
from trainer.recipe.image_sizes import ImageSize, in_pixels, sides
from trainer.saving.weights import write_whole
from trainer.training.trained import Trained, task_without_loss

BATCHES = (1, 2, 5)  # samples: another number than the one that was traced must do
TOLERANCE = 1e-4  # of the largest output
INSTEAD = {"onnx": "exported_program", "exported_program": "onnx"}
PREPARED = "pixels from 0 to 1, minus mean, divided by std"
COVERED = "in proportion, until the image just covers {} pixels"
OUTPUTS = {
    "classification": "a score a class: softmax gives probabilities",
    "multilabel": "a score a label: the sigmoid gives probabilities",
    "regression": "the values",
}
FACTS = "trainer.json"  # a further file in those of torch; in ONNX, which holds texts by name, one of them
Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExportSource:
    """A trained model, in evaluation on the CPU."""

    model: nn.Module
    inputs: TensorSpec  # of one sample, without the batch dimension
    # to be stored with the model, as JSON can: classes, mean, std, sizes, what inputs and outputs are
    facts: dict[str, Any]

    def sample(self, rows: int, seed: int = 0) -> Tensor:
        """Random inputs (rows, ...): normal real numbers; of whole ones 0 and 1, which every vocabulary has."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, *self.inputs.shape)
        if self.inputs.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.inputs.dtype)
        return torch.randint(0, 2, shape, generator=generator).to(self.inputs.dtype)


def load(path: Path, words: Sequence[str]) -> ExportSource:
    """The model of a run folder, a checkpoint or a file of weights. Raises CheckpointError, RecipeError."""
    trained = Trained.read(path, words)
    recipe, facts = trained.recipe, trained.facts
    if facts.classes is None or (facts.inputs is None and not facts.mean):
        raise CheckpointError(f"{path} does not say what its inputs are; give a run folder or its last.safetensors")
    classes, size, inputs = facts.classes, facts.image_size, facts.spec
    shorter = facts.shorter(size)
    if facts.mean:  # as `load` and `predict` have them, where data.image_size= says another size
        how = trained.preparation()[1]
        size, shorter = how.image_size, how.shorter_side
        inputs = TensorSpec((facts.channels, *sides(size)), inputs.dtype)
    task = task_without_loss(recipe, classes)
    model = trained.model(task, len(classes), facts.channels, size, None if facts.mean else inputs)
    exported = {
        "model": recipe.model.name,
        "task": recipe.task.name,
        "classes": classes,
        "mean": facts.mean,
        "std": facts.std,
        "channels": facts.channels,
        "image_size": size,
        **({"shorter_side": shorter, "resize": _resized(shorter, size)} if facts.mean else {}),
        **({"pixel_range": recipe.data.pixel_range} if recipe.data.pixel_range else {}),
        "inputs": json.loads(inputs.to_json()),
        "input": PREPARED if facts.mean else "as the data set gives them",
        "output": OUTPUTS.get(recipe.task.name, "as the model gives them"),
    }
    return ExportSource(model, inputs, exported)


def _resized(shorter: ImageSize, size: ImageSize) -> str:
    whole = f"the shorter side to {shorter} pixels" if isinstance(shorter, int) else COVERED.format(in_pixels(shorter))
    return f"{whole}, bilinear with antialiasing, then {in_pixels(size)} cut out of the centre"


def export(path: Path, kind: str, target: Path, words: Sequence[str]) -> str:
    """Export the weights at `path`; returns what to print. The file is written once its content was checked. Raises
    CheckpointError, RecipeError, SetupError, DiskFullError.
    """
    source = load(path, words)
    content, agreement = _checked(source, kind)
    write_whole(target, [memoryview(content)], "export", again="the same words again")
    shape = ", ".join(map(str, ("batch", *source.inputs.shape)))
    lines = {
        "file": f"{target}, {len(content) / 1e6:,.1f} MB",
        "input": f"{str(source.inputs.dtype).removeprefix('torch.')} ({shape}): {source.facts['input']}",
        "output": source.facts["output"],
        "agrees": agreement,
    }
    head = f"exported {path} ({source.facts['model']}) as format={kind}"
    return "\n".join([head, *(f"  {title:<7} {text}" for title, text in lines.items())]) + "\n"


def _checked(source: ExportSource, kind: str) -> tuple[bytes, str]:
    """A file's content, and how far its outputs are from the model's. Raises RecipeError."""
    try:
        with torch.no_grad():
            content, run = WRITERS[kind](source)
            return content, _agreement(source, run)
    except TrainerError:
        raise
    except Exception as error:  # the exporters raise as many kinds as there are things that they cannot express
        if is_out_of_memory(error):
            raise
        reason = " ".join(text_of(error).split())[:200] or "no reason given"
        raise RecipeError(
            f"format={kind} cannot express model.name={source.facts['model']} ({type(error).__name__}: {reason}): "
            f"try format={INSTEAD[kind]}"
        ) from None


def _agreement(source: ExportSource, run: Runner) -> str:
    worst, largest = 0.0, 0.0
    for rows in BATCHES:
        inputs = source.sample(rows, seed=rows)
        expected = source.model(inputs)
        with quietly():
            outputs = run(inputs)
        if outputs.shape != expected.shape:
            raise ValueError(f"for {rows} samples it gives {tuple(outputs.shape)} instead of {tuple(expected.shape)}")
        difference = (outputs.double() - expected.double()).abs().max().item()
        peak = expected.abs().max().item()
        worst, largest, most = max(worst, difference), max(largest, peak), TOLERANCE * (peak or 1.0)
        if not difference <= most:
            raise ValueError(f"for {rows} samples its outputs differ by {difference:.2g}, allowed is {most:.2g}")
    sizes = ", ".join(map(str, BATCHES))
    return f"on random batches of {sizes}: outputs of up to {largest:.3g} differ by at most {worst:.2g}"


def to_onnx(source: ExportSource) -> tuple[bytes, Runner]:
    """An ONNX file, and what runs it; the facts are its metadata trainer.json."""
    with quietly():
        exported: Any = torch.onnx.export(
            _program(source), (), dynamo=True, verbose=False, input_names=["input"], output_names=["output"]
        )
        exported.model.metadata_props[FACTS] = json.dumps(source.facts, indent=1)
        content = exported.model_proto.SerializeToString()  # protobuf holds 2 GB, and says so
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return content, lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])


def to_exported_program(source: ExportSource) -> tuple[bytes, Runner]:
    """A file of torch.export, and what runs it; the facts are a further file in it, trainer.json."""
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(_program(source), buffer, extra_files={FACTS: json.dumps(source.facts, indent=1)})
        buffer.seek(0)
        runner: Runner = torch.export.load(buffer).module()
    return buffer.getvalue(), runner


WRITERS = {"onnx": to_onnx, "exported_program": to_exported_program}


def _program(source: ExportSource) -> torch.export.ExportedProgram:
    """The model as a graph for any number of samples, without the paths of its code on this machine."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(source.model, (source.sample(2),), dynamic_shapes=({0: batch},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


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

"""Convert models to the formats of other programs, and check the outputs of converted models."""

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
from trainer.errors import (
    CheckpointError,
    RecipeError,
    TrainerError,
    build_missing_extra_error,
    is_out_of_memory,
    read_text,
)
from trainer.processes.terminal import say
from trainer.recipe.image_sizes import in_pixels, sides
from trainer.recipe.known_names import TASKS
from trainer.saving.weights import write_whole
from trainer.training.trained import Trained, create_task_without_loss

# Batch sizes of the check. The model is traced with 2 samples, and the file must work for any
# number of samples.
BATCHES = (1, 2, 5)
# Allowed difference of an output, relative to the largest output of the batch.
TOLERANCE = 1e-4
INSTEAD = {"onnx": "exported_program", "exported_program": "onnx"}
PREPARED = "pixels from 0 to 1, minus mean, divided by std"
COVERED = "in proportion, until the image just covers {} pixels"
OUTPUTS = {name: row.outputs for name, row in TASKS.items()}
# Name of the metadata in the exported file: the name of an extra file for torch.export, and of a
# metadata property for ONNX.
METADATA = "trainer.json"
Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExportSource:
    """Trained model to export.

    Attributes:
        model: Model in evaluation mode, on the CPU.
        inputs: Shape and type of one sample, without the batch dimension.
        facts: Metadata to store with the model, as JSON types: classes, mean, std, sizes, and
            descriptions of inputs and outputs.
    """

    model: nn.Module
    inputs: TensorSpec
    facts: dict[str, Any]

    def sample(self, rows: int, seed: int = 0) -> Tensor:
        """Return random inputs of shape (rows, ...).

        Floating-point inputs are normally distributed. Integers are 0 or 1, which are in every
        vocabulary.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, *self.inputs.shape)
        if self.inputs.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.inputs.dtype)
        return torch.randint(0, 2, shape, generator=generator).to(self.inputs.dtype)


def load(path: Path, words: Sequence[str]) -> ExportSource:
    """Read a model from a run folder, a checkpoint or a weights file.

    Raises:
        CheckpointError: There are no such weights, or they do not describe their inputs.
        RecipeError: An override is wrong.
    """
    trained = Trained.read(path, words)
    if line := trained.describe_choice():
        say(line)
    recipe = trained.recipe
    facts = trained.facts
    if facts.classes is None or (facts.inputs is None and not facts.mean):
        raise CheckpointError(
            f"{path} does not say what its inputs are; give a run folder or its last.safetensors"
        )
    classes = facts.classes
    size = facts.image_size
    inputs = facts.spec
    resizing: dict[str, Any] = {}
    if facts.mean:
        # data.image_size= may override the size, as in `trainer.load` and the command `predict`.
        preparation = trained.preparation()[1]
        size = preparation.image_size
        shorter = preparation.shorter_side
        resizing["shorter_side"] = shorter
        if isinstance(shorter, int):
            target = f"the shorter side to {shorter} pixels"
        else:
            target = COVERED.format(in_pixels(shorter))
        method = preparation.interpolation
        resizing["interpolation"] = method
        if method != "nearest":
            method += " with antialiasing"
        resizing["resize"] = f"{target}, {method}, then {in_pixels(size)} cut out of the centre"
        inputs = TensorSpec((facts.channels, *sides(size)), inputs.dtype)
    task = create_task_without_loss(recipe, classes)
    spec = None if facts.mean else inputs
    model = trained.model(task, len(classes), facts.channels, size, spec)
    if recipe.data.pixel_range:
        resizing["pixel_range"] = recipe.data.pixel_range
    metadata = {
        "model": recipe.model.name,
        "task": recipe.task.name,
        "classes": classes,
        "mean": facts.mean,
        "std": facts.std,
        "channels": facts.channels,
        "image_size": size,
        **resizing,
        "inputs": json.loads(inputs.to_json()),
        "input": PREPARED if facts.mean else "as the data set gives them",
        "output": OUTPUTS.get(recipe.task.name, "as the model gives them"),
    }
    return ExportSource(model, inputs, metadata)


def export(path: Path, kind: str, target: Path, words: Sequence[str]) -> str:
    """Export a trained model. The file is written only if its outputs agree with the model's.

    Args:
        path: Run folder, checkpoint or weights file.
        kind: Format, a key of `WRITERS`.
        target: File to write.
        words: Overrides of the run's recipe.

    Returns:
        The text that the command prints.

    Raises:
        CheckpointError: There are no such weights.
        RecipeError: The format cannot express the model.
        SetupError: A library is missing, or the file cannot be written.
        DiskFullError: The disk is full.
    """
    source = load(path, words)
    content, agreement = _write_and_check(source, kind)
    write_whole(target, [memoryview(content)], "export", again="the same command again")
    shape = ", ".join(map(str, ("batch", *source.inputs.shape)))
    dtype = str(source.inputs.dtype).removeprefix("torch.")
    lines = {
        "file": f"{target}, {len(content) / 1e6:,.1f} MB",
        "input": f"{dtype} ({shape}): {source.facts['input']}",
        "output": source.facts["output"],
        "agrees": agreement,
    }
    head = f"exported {path} ({source.facts['model']}) as format={kind}"
    rows = [f"  {title:<7} {text}" for title, text in lines.items()]
    return "\n".join([head, *rows]) + "\n"


def _write_and_check(source: ExportSource, kind: str) -> tuple[bytes, str]:
    """Convert the model, and check the result against it.

    Returns:
        (content, agreement): the bytes of the file, and a phrase that says by how much its outputs
        differ from those of the model.

    Raises:
        RecipeError: The format cannot express the model.
        SetupError: A library is missing.
    """
    try:
        with torch.no_grad():
            content, run = WRITERS[kind](source)
            return content, _compare(source, run)
    except TrainerError:
        raise
    # Exporters raise exceptions of any type for a model that they cannot express.
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, OSError):
            raise
        for cause in (error.__cause__, error):
            if isinstance(cause, ImportError):
                raise build_missing_extra_error(
                    f"format={kind}", [cause.name or "onnxscript"], cause
                ) from None
        reason = " ".join(read_text(error).split())[:200] or "no reason given"
        raise RecipeError(
            f"format={kind} cannot express model.name={source.facts['model']} "
            f"({type(error).__name__}: {reason}): try format={INSTEAD[kind]}"
        ) from None


def _compare(source: ExportSource, run: Runner) -> str:
    """Compare the outputs of a file with those of the model on random batches.

    Args:
        source: The model.
        run: Function that runs the file on a batch.

    Returns:
        A phrase with the largest output and the largest difference.

    Raises:
        ValueError: The outputs have another shape, or differ too much.
    """
    worst = 0.0
    largest = 0.0
    for rows in BATCHES:
        inputs = source.sample(rows, seed=rows)
        expected = source.model(inputs)
        with quietly():
            outputs = run(inputs)
        if outputs.shape != expected.shape:
            raise ValueError(
                f"for {rows} samples it gives {tuple(outputs.shape)} instead of "
                f"{tuple(expected.shape)}"
            )
        difference = (outputs.double() - expected.double()).abs().max().item()
        peak = expected.abs().max().item()
        worst = max(worst, difference)
        largest = max(largest, peak)
        allowed = TOLERANCE * (peak or 1.0)
        # A comparison with NaN is false, so `not <=` refuses NaN as well, whereas `>` would not.
        if not difference <= allowed:
            raise ValueError(
                f"for {rows} samples its outputs differ by {difference:.2g}, allowed is "
                f"{allowed:.2g}"
            )
    return (
        f"on random batches of {', '.join(map(str, BATCHES))}: outputs of up to {largest:.3g} "
        f"differ by at most {worst:.2g}"
    )


def to_onnx(source: ExportSource) -> tuple[bytes, Runner]:
    """Return the content of an ONNX file with the metadata, and a function that runs it."""
    with quietly():
        exported: Any = torch.onnx.export(
            _export_program(source),
            (),
            dynamo=True,
            verbose=False,
            input_names=["input"],
            output_names=["output"],
        )
        exported.model.metadata_props[METADATA] = json.dumps(source.facts, indent=1)
        # Protobuf raises an error here for more than 2 GB. `_write_and_check` turns the error into
        # a RecipeError that suggests format=exported_program.
        content = exported.model_proto.SerializeToString()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0])

    return content, run


def to_exported_program(source: ExportSource) -> tuple[bytes, Runner]:
    """Return the content of a torch.export file with the metadata, and a function that runs it."""
    buffer = io.BytesIO()
    metadata = {METADATA: json.dumps(source.facts, indent=1)}
    with quietly():
        torch.export.save(_export_program(source), buffer, extra_files=metadata)
        buffer.seek(0)
        runner = torch.export.load(buffer).module()
    return buffer.getvalue(), runner


WRITERS = {"onnx": to_onnx, "exported_program": to_exported_program}


def _export_program(source: ExportSource) -> torch.export.ExportedProgram:
    """Export the model as a graph for any batch size.

    Stack traces are removed, because they contain paths of this machine.
    """
    batch = torch.export.Dim("batch")
    program = torch.export.export(source.model, (source.sample(2),), dynamic_shapes=({0: batch},))
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


@contextmanager
def quietly() -> Iterator[None]:
    """Silence Python warnings, and log lines up to level ERROR, within the `with` block."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

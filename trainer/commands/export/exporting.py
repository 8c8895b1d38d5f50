"""Convert models to the formats of other programs, with one function for each format."""

import copy
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.commands.export.checking import (
    ExportSource,
    Runner,
    compare_with_model,
    compare_with_predict,
    quietly,
)
from trainer.commands.export.preprocessing import DeployedModel
from trainer.data import TensorSpec
from trainer.errors import (
    CheckpointError,
    RecipeError,
    TrainerError,
    build_missing_extra_error,
    describe,
    is_out_of_memory,
)
from trainer.recipe.image_sizes import in_pixels, sides
from trainer.recipe.known_names import TASKS
from trainer.saving.weights import write_whole
from trainer.tasks import Task
from trainer.training.trained import Preparation, Trained, create_task_without_loss
from trainer.versions import VERSION

# Allowed difference of an output, relative to the largest output, by the type of the network.
TOLERANCES = {"fp32": 1e-4, "fp16": 0.02}
# The same for a file that prepares photos: where a resized pixel lies between two bytes, programs
# round differently.
PHOTO_TOLERANCE = 0.005
INSTEAD = {"onnx": "exported_program", "exported_program": "onnx"}
NORMALIZED = "pixels from 0 to 1, minus mean, divided by std"
PHOTOS = "photos of any size, decoded, upright, {}"
COLOURS = {1: "gray (0.299 R + 0.587 G + 0.114 B)", 3: "RGB, transparent pixels white"}
AS_STORED = "as the data set gives them"
COVERED = "in proportion, until the image just covers {} pixels"
OUTPUTS = {name: row.outputs for name, row in TASKS.items()}
PROBABILITIES = "the probability of each class"
# Name of the metadata in the exported file: the name of an extra file for torch.export, and of a
# metadata property for ONNX.
METADATA = "trainer.json"


def load(path: Path, words: Sequence[str], preprocess: bool, precision: str) -> ExportSource:
    """Read a model from a run folder, a checkpoint or a weights file.

    Args:
        path: Run folder, checkpoint or weights file.
        words: Overrides of the run's recipe.
        preprocess: Whether the file prepares photos and returns probabilities.
        precision: Type in which the network computes, a key of `TOLERANCES`.

    Raises:
        CheckpointError: There are no such weights, or they do not describe their inputs.
        RecipeError: An override is wrong, or the file cannot prepare the photos.
    """
    trained = Trained.read(path, words)
    trained.say_choice()
    recipe = trained.recipe
    facts = trained.facts
    classes = facts.classes
    channels = facts.channels
    pixel_range = recipe.data.pixel_range
    if classes is None or (facts.inputs is None and not facts.mean):
        raise CheckpointError(
            f"{path} does not say what its inputs are; give a run folder or its last.safetensors"
        )
    preparation = None
    size = facts.image_size
    inputs = facts.spec
    if facts.mean:
        # data.image_size= may override the size, as in `trainer.load` and the command `predict`.
        preparation = trained.preparation()[1]
        size = preparation.image_size
        inputs = TensorSpec((channels, *sides(size)), inputs.dtype)
    task = create_task_without_loss(recipe, classes)
    spec = None if facts.mean else inputs
    network = trained.model(task, channels, size, spec)
    outputs = recipe.model.num_classes or 0
    unnamed = [f"class {n}" for n in range(len(classes), outputs)]
    metadata = {
        "model": recipe.model.name,
        "task": recipe.task.name,
        "classes": [*classes, *unnamed],
        "metric": find_metric(trained, task),
        "version": VERSION,
        "preprocess": preprocess,
        "precision": precision,
        "mean": facts.mean,
        "std": facts.std,
        "channels": channels,
        "image_size": size,
        "inputs": json.loads(inputs.to_json()),
        "input": NORMALIZED if facts.mean else AS_STORED,
        "output": OUTPUTS.get(recipe.task.name, "as the model gives them"),
    }
    if preparation is not None:
        metadata |= describe_preparation(preparation)
    if pixel_range:
        metadata["pixel_range"] = pixel_range
    tolerance = TOLERANCES[precision]
    if not preprocess:
        preparation = None
    elif type(task).to_probabilities is not Task.to_probabilities:
        metadata["output"] = PROBABILITIES
    if preparation is not None:
        if pixel_range:
            raise RecipeError(
                f"data.pixel_range={pixel_range}: a file that prepares photos accepts "
                "bytes, and not pixels of more bits: type preprocess=false"
            )
        metadata["inputs"] = ["uint8", ["height", "width", channels]]
        metadata["input"] = PHOTOS.format(COLOURS.get(channels, AS_STORED))
        tolerance = max(tolerance, PHOTO_TOLERANCE)
    reference = network
    if preprocess:
        reference = DeployedModel(network, task, preparation).eval()
    model = reference
    if precision == "fp16":
        half = copy.deepcopy(network).half()
        model = DeployedModel(half, task if preprocess else None, preparation, is_half=True).eval()
    return ExportSource(
        trained=trained,
        task=task,
        network=network,
        model=model,
        reference=reference,
        inputs=inputs,
        preparation=preparation,
        tolerance=tolerance,
        facts=metadata,
    )


def describe_preparation(preparation: Preparation) -> dict[str, Any]:
    """Return the metadata that say how a photo becomes as large as the network's input."""
    shorter = preparation.shorter_side
    if isinstance(shorter, int):
        target = f"the shorter side to {shorter} pixels"
    else:
        target = COVERED.format(in_pixels(shorter))
    cut = in_pixels(preparation.image_size)
    method = preparation.interpolation
    filtered = method
    if method != "nearest":
        filtered += " with antialiasing"
    resize = f"{target}, {filtered}, then {cut} cut out of the centre"
    return {"shorter_side": shorter, "interpolation": method, "resize": resize}


def find_metric(trained: Trained, task: Task) -> dict[str, Any]:
    """Return the name of the deciding metric, and its value for these weights; None if unknown."""
    metadata = trained.metadata
    # Weights of older versions, and of steps that were not evaluated, have no metric.
    if "metric" not in metadata:
        return {"name": trained.own.task.metric or task.metric, "value": None}
    return {"name": json.loads(metadata["metric"]), "value": json.loads(metadata["value"])}


def export(source: ExportSource, kind: str, target: Path) -> str:
    """Export a trained model. The file is written only if its outputs agree with the model's.

    Args:
        source: The model.
        kind: Format, a key of `WRITERS`.
        target: File to write.

    Returns:
        The text that the command prints.

    Raises:
        RecipeError: The format cannot express the model.
        SetupError: A library is missing, or the file cannot be written.
        DiskFullError: The disk is full.
    """
    content, agreements = _write_and_check(source, kind)
    write_whole(target, [memoryview(content)], "export", again="the same command again")
    dtype, sizes = source.facts["inputs"]
    shape = ", ".join(map(str, ("batch", *sizes)))
    lines = {
        "file": f"{target}, {len(content) / 1e6:,.1f} MB",
        "input": f"{dtype} ({shape}): {source.facts['input']}",
        "output": source.facts["output"],
        **agreements,
    }
    head = f"exported {source.trained.path} ({source.facts['model']}) as format={kind}"
    rows = [f"  {title:<7} {text}" for title, text in lines.items()]
    return "\n".join([head, *rows]) + "\n"


def _write_and_check(source: ExportSource, kind: str) -> tuple[bytes, dict[str, str]]:
    """Convert the model, and check the result against it.

    Returns:
        (content, agreements): the bytes of the file, and phrases that say by how much its outputs
        differ from those of the model, and from those of `predict` if the file prepares photos.

    Raises:
        RecipeError: The format cannot express the model, or `predict` answers differently.
        SetupError: A library is missing.
    """
    remedy = f"try format={INSTEAD[kind]}"
    if source.facts["precision"] == "fp16":
        remedy = "type precision=fp32"
    try:
        with torch.no_grad():
            content, run = WRITERS[kind](source)
            agreements = {"agrees": compare_with_model(source, run)}
            if source.preparation is not None:
                agreements |= compare_with_predict(source, run)
        return content, agreements
    except TrainerError:
        raise
    # Exporters raise exceptions of any type for a model that they cannot express.
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, OSError):
            raise
        for cause in _list_causes(error):
            if isinstance(cause, ImportError):
                raise build_missing_extra_error(
                    f"format={kind}", [cause.name or "onnxscript"], cause
                ) from None
        raise RecipeError(
            f"format={kind} cannot express model.name={source.facts['model']} "
            f"({describe(error)}): {remedy}"
        ) from None


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it: exporters hide a missing package deep inside."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def to_onnx(source: ExportSource) -> tuple[bytes, Runner]:
    """Return the content of an ONNX file with the metadata, and a function that runs it."""
    with quietly():
        exported: Any = torch.onnx.export(
            _export_program(source),
            (),
            # The program has these dimensions already, but its names for them are not kept.
            dynamic_shapes=({n: name for n, name in enumerate(_name_dimensions(source))},),
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
    """Export the model as a graph for any batch size and, if it prepares photos, any photo size.

    Stack traces are removed, because they contain paths of this machine.
    """
    names = _name_dimensions(source)
    dimensions = {n: torch.export.Dim(name) for n, name in enumerate(names)}
    program = torch.export.export(source.model, (source.sample(2),), dynamic_shapes=(dimensions,))
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def _name_dimensions(source: ExportSource) -> list[str]:
    """Return the names of the input's leading dimensions, whose sizes are free."""
    if source.preparation is None:
        return ["batch"]
    return ["batch", "height", "width"]

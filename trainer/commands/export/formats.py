"""What is exported, and one function a format: it writes the model and what a program has to know of it, and gives back
what runs the file."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.commands.trained import Trained, WeightFacts, task_without_loss
from trainer.data import TensorSpec, open_datasets
from trainer.errors import CheckpointError, RecipeError
from trainer.recipe import Recipe
from trainer.saving.tensor_files import write_synced
from trainer.training.snapshots import of_data

PREPARED = "pixels from 0 to 1, minus mean, divided by std"
RESIZED = (
    "the shorter side to {} pixels, bilinear with antialiasing, then {} x {} cut out of the centre"  # `photos.held_out`
)
OUTPUTS = {
    "classification": "a score a class: softmax gives probabilities",
    "multilabel": "a score a label: the sigmoid gives probabilities",
    "regression": "the values",
}
FACTS = "trainer.json"  # a further file in those of torch; in ONNX, which holds texts by name, one of them
ONE_FILE = 1.9e9  # bytes that protobuf can hold, and some room: an ONNX file with more has its weights beside it


@dataclass(frozen=True)
class ExportSource:
    """A trained model, in evaluation on the CPU."""

    recipe: Recipe
    model: nn.Module
    inputs: TensorSpec  # of one sample, without the batch dimension
    # to be stored with the model, as JSON can: classes, mean, std, sizes, what inputs and outputs are
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]  # the weights as they were saved

    def texts(self) -> dict[str, str]:
        """The facts for files that hold nothing but texts: what is none is written as JSON."""
        return {key: fact if isinstance(fact, str) else json.dumps(fact) for key, fact in self.facts.items()}

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
    if facts.classes is None or (facts.inputs is None and not facts.mean):  # weights of an older version
        facts = _of_data_set(path, recipe)
    classes, size, inputs = facts.classes or (), facts.image_size, facts.spec
    if facts.mean and recipe.data.image_size != size and any(word.startswith("data.image_size=") for word in words):
        raise RecipeError(
            f"data.image_size={recipe.data.image_size}: {path} has images of {size} pixels, and so has its export: "
            "leave it out"
        )
    task = task_without_loss(recipe, classes)
    model = trained.model(task, len(classes), facts.channels, size, None if facts.mean else inputs)
    shorter = facts.shorter(size)
    exported = {
        "model": recipe.model.name,
        "task": recipe.task.name,
        "classes": classes,
        "mean": facts.mean,
        "std": facts.std,
        "channels": facts.channels,
        "image_size": size,
        **({"shorter_side": shorter, "resize": RESIZED.format(shorter, size, size)} if facts.mean else {}),
        **({"pixel_range": recipe.data.pixel_range} if recipe.data.pixel_range else {}),
        "inputs": json.loads(inputs.to_json()),
        "input": PREPARED if facts.mean else "as the data set gives them",
        "output": OUTPUTS.get(recipe.task.name, "as the model gives them"),
    }
    return ExportSource(recipe, model, inputs, exported, trained.weights)


def _of_data_set(path: Path, recipe: Recipe) -> WeightFacts:
    try:
        return WeightFacts.read(path, of_data(open_datasets(recipe)))
    except RecipeError as error:
        raise CheckpointError(
            f"{path} does not say what its inputs are, and its data set cannot be opened: {error}"
        ) from None


Runner = Callable[[Tensor], Tensor]


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
        # torch's own writer ends the process where the disk is full: it has the file in memory, and we write it.
        write_synced(path, [buffer.getbuffer()], "export")
        runner: Runner = torch.export.load(path).module()
    return runner


WRITERS: dict[str, Callable[[ExportSource, Path], Runner]] = {
    "onnx": to_onnx,
    "exported_program": to_exported_program,
}


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

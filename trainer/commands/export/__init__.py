"""`python -m trainer export`: a trained model as a file that other programs run, checked against the model itself.

Words are checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import RecipeError, SetupError
from trainer.launch import launching
from trainer.recipe.recipe_files import split_words
from trainer.recipe.text import misspelt
from trainer.saving.run_names import is_run, run_named

SUFFIXES = {"onnx": ".onnx", "exported_program": ".pt2"}
GONE = {
    "torchscript": "format=exported_program is its successor, for torch.export.load and AOTInductor",
    "safetensors": "the run folder's last.safetensors and best.safetensors are such files already",
}
ONNX = ("onnx", "onnxscript", "onnxruntime")
EXAMPLE = "as in export runs/x format=onnx"


def command(words: Sequence[str]) -> str:
    """Export what the words name; returns what to print. Raises RecipeError, SetupError, CheckpointError."""
    options, rest = split_words(words, ("format", "output", "plugin", "checkpoint"))
    run = _run([options["checkpoint"]] if "checkpoint" in options else [], rest)
    rest = [word for word in rest if "=" in word]
    kind = _format(options.get("format"), options.get("output"))
    path = run_named(run)
    target = Path(options["output"]).expanduser() if "output" in options else default_target(path, kind)
    launching.load_plugin(options.get("plugin"))
    return export_run(path, kind, target, rest)


def export_run(path: Path, kind: str, target: Path, words: Sequence[str]) -> str:
    """Export the weights at `path` as `kind` into the file `target`; returns what to print. Raises as `command`."""
    _check_target(target, kind)
    from trainer.commands.export import exporting

    return exporting.export(path, kind, target, words)


def _run(named: list[str], rest: Sequence[str]) -> str:
    runs = [*named, *(word for word in rest if "=" not in word)]
    if len(runs) != 1:
        raise RecipeError(f"export needs one run, {EXAMPLE}, not {len(runs)}; runs lists them")
    return runs[0]


def _format(asked: str | None, output: str | None) -> str:
    """The format that `format=` names, or the one that `output=` ends with."""
    if asked is None:
        for kind, suffix in SUFFIXES.items():
            if output and Path(output).suffix == suffix:
                return kind
        for kind, instead in GONE.items():
            if output and Path(output).suffix == f".{kind}":
                raise RecipeError(f"format={kind} is no more: {instead}")
        raise RecipeError(f"export needs format=, one of {', '.join(SUFFIXES)}, {EXAMPLE}")
    return format_named(asked)


def format_named(asked: str) -> str:
    """A format by its name. Raises RecipeError, with the one that may be meant."""
    if asked in GONE:
        raise RecipeError(f"format={asked} is no more: {GONE[asked]}")
    if asked not in SUFFIXES:
        guess = misspelt(asked.lower().lstrip("."), SUFFIXES)
        hint = f"; did you mean format={guess}?" if guess else ""
        raise RecipeError(f"format={asked[:80]} is not one of {', '.join(SUFFIXES)}{hint}")
    return asked


def default_target(path: Path, kind: str) -> Path:
    """model.onnx in the run folder; of best.safetensors model-best.onnx, of a checkpoint model-step-00000120.onnx."""
    if not path.is_dir():
        stem = "" if path.stem == "last" else f"-{path.stem}"
        return path.parent / f"model{stem}{SUFFIXES[kind]}"
    if path.name and not is_run(path, ("last.safetensors",)):
        home = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return home / f"model-{path.name}{SUFFIXES[kind]}"
    return path / f"model{SUFFIXES[kind]}"


def _check_target(target: Path, kind: str) -> None:
    """Before anything is computed. Raises RecipeError, SetupError."""
    if target.suffix != SUFFIXES[kind]:
        raise RecipeError(f"output={target}: files of format={kind} end with {SUFFIXES[kind]}")
    if target.exists() or target.is_symlink():
        raise RecipeError(f"{target} is there already: remove it, or choose another output=")
    if target.parent.exists() and not target.parent.is_dir():
        raise RecipeError(f"output={target}: {target.parent} is a file; choose another output=")
    if not target.parent.is_dir() and target.parent.name:
        raise SetupError(f"output={target}: there is no folder {target.parent}; make it, or choose another output=")
    absent = [name for name in ONNX if kind == "onnx" and find_spec(name) is None]
    if absent:
        raise SetupError(f"format=onnx needs {', '.join(absent)}: pip install {' '.join(ONNX)}")

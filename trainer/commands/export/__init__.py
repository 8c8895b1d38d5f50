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
from trainer.saving.run_names import is_run, run_named

SUFFIXES = {"onnx": ".onnx", "exported_program": ".pt2"}
ONNX = ("onnx", "onnxscript", "onnxruntime")
EXAMPLE = "as in export runs/x format=onnx"


def command(words: Sequence[str]) -> str:
    """Export what the words name; returns what to print. Raises RecipeError, SetupError, CheckpointError."""
    options, rest = split_words(words, ("format", "output", "plugin", "checkpoint"))
    runs = [options["checkpoint"]] if "checkpoint" in options else []
    runs += [word for word in rest if "=" not in word]
    if len(runs) != 1:
        raise RecipeError(f"export needs one run, {EXAMPLE}, not {len(runs)}; runs lists them")
    launching.load_plugin(options.get("plugin"))
    rest = [word for word in rest if "=" in word]
    return export_run(run_named(runs[0]), options.get("format", ""), options.get("output"), rest)[1]


def export_run(path: Path, kind: str, output: str | Path | None, words: Sequence[str]) -> tuple[Path, str]:
    """Export the weights at `path` as `kind` into `output` (None: beside them); returns the file, and what to print.
    Raises as `command`."""
    if kind not in SUFFIXES:
        raise RecipeError(f"format={kind[:80]}: export needs one of {', '.join(SUFFIXES)}, {EXAMPLE}")
    target = _default_target(path, kind) if output is None else Path(output).expanduser()
    if target.suffix != SUFFIXES[kind]:
        raise RecipeError(f"output={target}: files of format={kind} end with {SUFFIXES[kind]}")
    if target.exists() or target.is_symlink():
        raise RecipeError(f"{target} is there already: remove it, or choose another output=")
    if not target.parent.is_dir():
        raise SetupError(f"output={target}: there is no folder {target.parent}; make it, or choose another output=")
    absent = [name for name in ONNX if kind == "onnx" and find_spec(name) is None]
    if absent:
        raise SetupError(f"format=onnx needs {', '.join(absent)}: pip install {' '.join(ONNX)}")
    from trainer.commands.export import exporting

    return target, exporting.export(path, kind, target, words)


def _default_target(path: Path, kind: str) -> Path:
    """model.onnx in the run folder; of best.safetensors model-best.onnx, of a checkpoint model-step-00000120.onnx."""
    if path.is_dir() and is_run(path, ("last.safetensors",)):
        return path / f"model{SUFFIXES[kind]}"
    if path.stem == "last":
        return path.with_name(f"model{SUFFIXES[kind]}")
    return path.parents[path.parent.name == "checkpoints"] / f"model-{path.stem}{SUFFIXES[kind]}"

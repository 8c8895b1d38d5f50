"""`python -m trainer export`: write a trained model as a file for other programs.

The file is checked against the model. Arguments are checked before torch is imported.
"""

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import RecipeError, SetupError, load_extra
from trainer.launch import launching
from trainer.recipe import split_arguments
from trainer.saving.run_names import find_run, is_run

SUFFIXES = {"onnx": ".onnx", "exported_program": ".pt2"}
PRECISIONS = ("fp32", "fp16")
ONNX = ("onnx", "onnxscript", "onnxruntime", "onnx_ir")
EXAMPLE = "as in export runs/x format=onnx"


def command(words: Sequence[str]) -> str:
    """Export the run that the arguments name, and return the text to print.

    Raises:
        RecipeError: An argument is wrong, or the format cannot express the model.
        SetupError: A library is missing, or the file cannot be written.
        CheckpointError: There is no such run, or it has no weights.
    """
    names = ("format", "output", "preprocess", "precision", "plugin", "checkpoint")
    options, overrides = split_arguments(words, names)
    # The command line's parser turns the positional argument RUN into checkpoint=RUN.
    if "checkpoint" not in options:
        raise RecipeError(f"export needs a run, {EXAMPLE}; runs lists them")
    launching.load_plugin(options.get("plugin"))
    run = find_run(options["checkpoint"])
    preprocess = options.get("preprocess", "true")
    if preprocess not in ("true", "false"):
        raise RecipeError(f"preprocess={preprocess[:80]} must be true or false")
    return export_run(
        run,
        options.get("format", ""),
        options.get("output"),
        overrides,
        preprocess == "true",
        options.get("precision", "fp32"),
    )[1]


def export_run(
    path: Path,
    kind: str,
    output: str | Path | None,
    words: Sequence[str],
    preprocess: bool,
    precision: str,
) -> tuple[Path, str]:
    """Export a trained model to a file.

    Args:
        path: Run folder, checkpoint or weights file.
        kind: Format, a key of `SUFFIXES`.
        output: File to write; None puts it next to the weights.
        words: Overrides of the run's recipe.
        preprocess: Whether the file prepares photos and returns probabilities, instead of the
            network alone.
        precision: Type in which the network computes, one of `PRECISIONS`.

    Returns:
        (target, text): the path of the file, and the text to print.

    Raises:
        RecipeError, SetupError, CheckpointError: As in `command`.
    """
    if kind not in SUFFIXES:
        raise RecipeError(
            f"format={kind[:80]}: export needs one of {', '.join(SUFFIXES)}, {EXAMPLE}"
        )
    if precision not in PRECISIONS:
        raise RecipeError(
            f"precision={precision[:80]}: export needs one of {', '.join(PRECISIONS)}"
        )
    if output is None:
        target = _choose_target(path, kind)
    else:
        target = Path(output).expanduser()
    if target.suffix != SUFFIXES[kind]:
        raise RecipeError(f"output={target}: files of format={kind} end with {SUFFIXES[kind]}")
    if target.exists() or target.is_symlink():
        raise RecipeError(f"{target} is there already: remove it, or choose another output=")
    if not target.parent.is_dir():
        raise SetupError(
            f"output={target}: there is no folder {target.parent}; make it, or choose another "
            "output="
        )
    if kind == "onnx":
        load_extra("format=onnx", *ONNX)
    from trainer.commands.export import exporting

    source = exporting.load(path, words, preprocess, precision)
    return target, exporting.export(source, kind, target)


def _choose_target(path: Path, kind: str) -> Path:
    """Return the path of the file next to the weights.

    For format=onnx it is model.onnx for a run, model-last.onnx for last.safetensors, and
    model-step-00000120.onnx for a checkpoint.
    """
    if path.is_dir() and is_run(path, ("best.safetensors", "last.safetensors")):
        return path / f"model{SUFFIXES[kind]}"
    folder = path.parent
    if folder.name == "checkpoints":
        folder = folder.parent
    return folder / f"model-{path.stem}{SUFFIXES[kind]}"

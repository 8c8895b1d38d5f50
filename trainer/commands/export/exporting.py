"""Writing the file, comparing its outputs with the model's, and the lines that say so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trainer.commands.export.formats import FACTS, WRITERS, ExportSource, Runner, load, quietly
from trainer.errors import RecipeError, TrainerError, is_out_of_memory, text_of
from trainer.saving.files import put, remove, writing
from trainer.saving.locks import lock_alone, open_lock
from trainer.saving.tensor_files import sync

BATCHES = (1, 2, 5)  # samples: another number than the one that was traced must do
TOLERANCE = 1e-4  # of the largest output
DRAFT, LOCK = ".export-", ".lock"  # a file's folder until it was checked; its lock is held as long
INSTEAD = {"onnx": "exported_program", "exported_program": "onnx"}


def export(path: Path, kind: str, target: Path, words: Sequence[str]) -> str:
    """Export the weights at `path`; returns what to print. The file has its name only once it was checked. Raises
    CheckpointError, RecipeError, SetupError, DiskFullError.
    """
    source = load(path, words)
    folder = target.parent
    with writing(folder, "the same words again"), _draft(folder) as draft:
        written = draft / target.name
        agreement = _checked(source, kind, written)
        files = sorted(draft.iterdir(), key=lambda file: file == written)  # the model itself last
        size = sum(file.stat().st_size for file in files)
        for file in files:
            sync(file)
            put(file, folder / file.name)
    return _report(source, path, kind, target, size, agreement)


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder in `folder` that is removed after the block; those that killed exports left behind are removed now."""
    for left in folder.glob(f"{DRAFT}????????"):
        with suppress(OSError), open(left / LOCK, "r+") as lock:  # one without is not ours
            if lock_alone(lock.fileno()):
                remove(left)
    draft = Path(tempfile.mkdtemp(prefix=".exporting-", dir=folder))
    home = draft.with_name(draft.name.replace(".exporting-", DRAFT))
    try:
        with open(open_lock(draft / LOCK)) as lock:
            lock_alone(lock.fileno())  # before it has the name that others look for
            draft.rename(home)
            (home / "files").mkdir()
            yield home / "files"
    finally:
        remove(draft)
        remove(home)


def _checked(source: ExportSource, kind: str, path: Path) -> str:
    """Write the file and run it; returns how far its outputs are from the model's. Raises RecipeError."""
    name = source.recipe.model.name
    try:
        with torch.no_grad():
            return _agreement(source, WRITERS[kind](source, path))
    except TrainerError:
        raise
    except Exception as error:  # the exporters raise as many kinds as there are things that they cannot express
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        reason = " ".join(text_of(error).split())[:200] or "no reason given"
        raise RecipeError(
            f"format={kind} cannot express model.name={name} ({type(error).__name__}: {reason}): "
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
    differ = f"outputs of up to {largest:.3g} differ by at most {worst:.2g}"
    allowed = f"          (allowed: {TOLERANCE:g} of a batch's largest output)"
    return f"with the model on random batches of {sizes}: {differ}\n{allowed}"


def _report(source: ExportSource, path: Path, kind: str, target: Path, size: int, agreement: str) -> str:
    shape = ", ".join(map(str, ("batch", *source.inputs.shape)))
    names = source.facts["classes"]
    first = ", ".join(map(str, names[:5]))
    lines = {
        "file": f"{target}, {size / 1e6:,.1f} MB",
        "input": f"{str(source.inputs.dtype).removeprefix('torch.')} ({shape}): {source.facts['input']}",
        **({"resize": source.facts["resize"]} if "resize" in source.facts else {}),
        "output": source.facts["output"],
        "holds": f"{len(names)} names ({first}{', ...' * (len(names) > 5)}), mean, std and size",
        "agrees": agreement,
    }
    head = f"exported {path} ({source.recipe.model.name}) as format={kind}"
    report = [head, *(f"  {title:<7} {text}" for title, text in lines.items())]
    used = [f"    {line}" for line in usage(kind, target)]
    return "\n".join([*report, "  in Python, for prepared images (python -m trainer guide export):", *used]) + "\n"


def usage(kind: str, target: Path) -> tuple[str, ...]:
    """Three lines of Python that give the scores of `images`; `facts` says how these are prepared."""
    path, name = repr(str(target)), repr(FACTS)
    if kind == "onnx":
        return (
            f"import json, onnxruntime; session = onnxruntime.InferenceSession({path})",
            f"facts = json.loads(session.get_modelmeta().custom_metadata_map[{name}])",
            'scores = session.run(None, {"input": images})[0]',
        )
    return (
        f'import json, torch; beside = {{{name}: ""}}',
        f"model = torch.export.load({path}, extra_files=beside).module()",
        f"facts, scores = json.loads(beside[{name}]), model(images)",
    )

"""`python -m trainer runs`: the runs there are, one of them on a page, and removing them.

Reads run folders, whoever wrote them and however the run ended; torch is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from trainer.commands.runs.run_status import RunSummary, look, named, show
from trainer.errors import FolderInUseError, RecipeError, SetupError
from trainer.processes.terminal import agreed
from trainer.recipe.recipe_files import split_words
from trainer.saving import locks, run_folder
from trainer.saving.files import remove, why
from trainer.saving.journal import JOURNAL
from trainer.telemetry import readable

HOME = Path("runs")  # where training puts its folders
USAGE = "type runs, runs show RUN or runs delete RUN"
HEAD = ("run", "mode", "model", "status", "best", "images/s", "age", "size")
OF_RUN = (*run_folder.WRITTEN, JOURNAL)
WRITTEN = (  # by training, drafts among it, and by commands on a run
    *OF_RUN, *(f".{name}.*" for name in OF_RUN), "checkpoints", "last.safetensors", "best.safetensors",
    "model*.safetensors", "model*.onnx", "model*.onnx.data", "model*.pt2", "model*.torchscript", "wandb",
    "slurm-*.log", run_folder.LOCK, ".*.tmp", ".events.*", ".export-*",
)  # fmt: skip
STOP = "stop it first (Ctrl-C, or kill its process)"


def command(words: Sequence[str]) -> str:
    """What `python -m trainer runs words...` prints. Raises RecipeError, FolderInUseError, SetupError."""
    options, names = split_words(words, ("yes",))
    task = names.pop(0) if names and names[0] in ("list", "show", "delete") else ""
    odd = [name for name in names if name.startswith("-") or "=" in name]
    odd = [name for name in odd if not os.path.lexists(name) and not os.path.lexists(HOME / name)]
    if odd or (options and task != "delete"):
        raise RecipeError(f"'{(odd or ['yes='])[0]}' is not a word of runs{' ' * bool(task)}{task}: {USAGE}")
    if task == "delete" and names:
        return delete([named(name, HOME) for name in names], options.get("yes"))
    if task in ("show", "delete") and len(names) != 1:
        raise RecipeError(f"runs {task} needs the name of a run, as in runs {task} NAME; runs lists them")
    if len(names) > 1:
        raise RecipeError(f"'{' '.join(names)[:80]}' is not understood: {USAGE}")
    if task == "show":
        return show(named(names[0], HOME))
    if not names:
        return table(HOME)
    for path in (Path(names[0]).expanduser(), HOME / names[0]):
        if path.is_dir() and look(path) is None:
            return table(path)
    return show(named(names[0], HOME))


def table(home: Path) -> str:
    """What `runs` prints. Raises SetupError."""
    runs = sorted(below(home) if home.is_dir() else [], key=lambda run: -run.changed)
    if not runs:
        return f"no runs below {home}: python -m trainer recipe=digits output={home}/first trains one\n"
    lines = readable.table([HEAD, *(_cells(run, home) for run in runs)], {5, 6, 7})
    notes = [f"{_name(run, home)}: {readable.plain(run.note)}" for run in runs if run.note]
    lines += ["", *(readable.shortened(line, readable.columns()) for line in notes)] if notes else []
    apart = {run.path.resolve(): run for run in runs}.values()  # links name some twice
    total = f"{readable.counted(len(apart), 'run')}, {readable.as_size(sum(run.size for run in apart))}"
    return "\n".join([*lines, "", f"{total}; see one: python -m trainer runs show NAME"]) + "\n"


def below(home: Path, levels: int = 2) -> list[RunSummary]:
    """Every run below a folder, as in runs/paper/seed3. Raises SetupError."""
    try:
        names = sorted(name for name in os.listdir(home) if not name.startswith("."))
    except OSError as error:
        raise SetupError(f"{home} cannot be read ({why(error)}): give another folder, as in runs FOLDER") from None
    runs = []
    for path in (home / name for name in names):
        if (run := look(path)) is not None:
            runs.append(run)
        elif levels > 1 and not path.is_symlink() and os.path.isdir(path):
            with suppress(SetupError):
                runs += below(path, levels - 1)
    return runs


def _name(run: RunSummary, home: Path) -> str:
    return readable.plain(str(run.path.relative_to(home)))


def _cells(run: RunSummary, home: Path) -> tuple[str, ...]:
    best = run.best
    return (
        _name(run, home),
        readable.shortened(readable.plain(run.mode or "-"), 12),
        readable.shortened(readable.plain(run.model or "-"), 18),
        run.status,
        f"{readable.shortened(readable.plain(best[0]), 10)} {readable.score(*best)}" if best else "-",
        readable.number(run.speed),
        readable.duration(max(0.0, time.time() - run.changed)),
        readable.as_size(run.size),
    )


def delete(runs: Sequence[RunSummary], yes: str | None) -> str:
    """Remove runs once the user agrees, or has agreed by yes=true; what no run wrote stays, with a line that says so.
    Raises RecipeError, FolderInUseError, SetupError.
    """
    if yes not in (None, "true", "false"):
        raise RecipeError(f"yes={yes} must be true or false")
    unique = list({run.path.resolve(): run for run in runs}.values())
    for run in unique:
        if run.path.is_symlink():
            raise RecipeError(f"{run.path} is a link: give the run itself, {run.path.resolve()}, or remove the link")
        if run.path.resolve() in (Path.cwd(), *Path.cwd().parents):
            raise RecipeError(f"{run.path.resolve()} is the folder you are in: cd .. and give its name")
        if run.status == "running":
            raise FolderInUseError(f"{run.path} is running: {STOP}; nothing was deleted")
    lines = []
    for run in unique:
        best = f", {run.best[0]} {readable.score(*run.best)}" if run.best else ""
        lines.append(f"  {readable.plain(str(run.path))}: {run.status}{best}, {readable.as_size(run.size)}")
    question = f"delete {'this run' if len(unique) == 1 else f'these {len(unique)} runs'}?"
    if yes != "true" and not (yes is None and agreed("runs delete", "\n".join(lines), question)):
        return "nothing was deleted\n"
    return "".join(f"{_delete(run)}\n" for run in unique)


def _delete(run: RunSummary) -> str:
    """Remove what a run wrote, its lock last, so that no other run begins in the folder meanwhile."""
    path = run.path
    try:
        lock = locks.hold(path, "run")
    except FolderInUseError:
        raise FolderInUseError(f"{path} is running: {STOP}") from None
    try:
        for name in sorted(os.listdir(path), key=lambda name: name == run_folder.LOCK):
            if _is_written(name):
                remove(path / name)
        left = sorted(os.listdir(path))
        if still := [name for name in left if _is_written(name)]:
            raise SetupError(f"{path / still[0]} cannot be removed: check its owner and permissions (ls -l)")
        if not left:
            path.rmdir()
    except SetupError:
        raise
    except OSError as error:
        raise SetupError(f"{path} cannot be removed ({why(error)}): check its owner and permissions (ls -l)") from None
    finally:
        os.close(lock)
    if not left:
        return f"deleted {readable.plain(str(path))} ({readable.as_size(run.size)})"
    shown = readable.plain(", ".join(left[:3])) + f" and {len(left) - 3} more" * (len(left) > 3)
    return f"deleted the run in {readable.plain(str(path))}; kept, because no run wrote it: {shown}"


def _is_written(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WRITTEN)

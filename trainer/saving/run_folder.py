"""The run folder: chosen, claimed by one job at a time, and its files. Only rank 0 has one."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.errors import FolderInUseError, RecipeError, SetupError, TrainerError
from trainer.processes.rank import is_restart, is_this_job, signature
from trainer.processes.terminal import agreed
from trainer.recipe import Recipe, recipe_files
from trainer.recipe.reflection import new_cosine, trains_longer
from trainer.recipe.removed import computed_otherwise
from trainer.saving import locks
from trainer.saving.files import read, usable_json, why, write_atomically, writing
from trainer.saving.journal import JOURNAL

# Keys of data that a run settles before it writes its recipe.
CHOSEN = ("image_size", "channels", "mean", "std", "cache_format", "cache_size")
LOCK = ".lock"  # its file names the job that holds the folder, or held it last
WRITTEN = (  # what a run that saved nothing leaves, beside its journal
    "recipe.yaml", "result.json", "steps.csv", "split.csv", "contact_sheet.png", "tuning.json", "skipped.csv",
    "worst.csv", "timeline.*", "*events.out.tfevents.*", "stacks-rank*.txt", "wandb.json", "mlflow.json",
)  # fmt: skip


class NullFolder:
    """Of a rank that has no run folder."""

    path: Path | None = None
    resuming = False  # whether the newest good checkpoint in it is to be continued
    replaced = False  # whether a run that ended before it saved anything made way
    shorter: Recipe | None = None  # of the run to be continued, where this one is to train longer

    def __init__(self) -> None:
        # Keys of the recipe that the run to be continued chose, where this recipe leaves them open.
        self.resolved_keys: dict[str, Any] = {}

    def check(self) -> None: ...
    def keep_tuned(self, tuned: Mapping[str, Any]) -> None: ...

    def tuned(self, warn: Callable[[str], None]) -> dict[str, Any]:
        return {}

    def previous_result(self, warn: Callable[[str], None]) -> dict[str, Any]:
        return {}


class RunFolder(NullFolder):
    """A folder held under a lock as long as this process lives."""

    path: Path

    def __init__(self, recipe: Recipe) -> None:
        """Choose and claim the folder: `output`, or runs/<recipe>-<mode>-<time>.

        Raises:
            FolderInUseError: it holds another run, finished or alive.
            RecipeError: it is continued with a recipe that computes something else.
            DiskFullError, SetupError: it cannot be written.
        """
        super().__init__()
        self.path = Path(recipe.output).expanduser() if recipe.output else fresh_folder(recipe)
        self._made = recipe.output is None or not os.path.lexists(self.path)
        self._first = not os.path.lexists(self.path / LOCK)
        self._lock = locks.hold(self.path, "run", LOCK)
        self._one_check = threading.Lock()  # training and the saver's thread may both find the lock gone
        try:
            self.resuming = self._claim(recipe)
        except BaseException:
            self.close()
            raise

    def _claim(self, recipe: Recipe) -> bool:
        """Whether the folder's run is to be continued; signs the lock with this job's name."""
        try:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace")
        except OSError:  # no file
            owner = ""
        used = any(os.path.lexists(self.path / name) for name in ("recipe.yaml", "result.json"))
        restarted = is_this_job(owner)
        if owner and not restarted and not self._saved():  # without an owner the files are the user's own
            self._clear(recipe.resume)
            used, self.replaced = False, used
        resuming = used and (recipe.resume == "auto" or restarted)
        if used and not resuming:
            raise FolderInUseError(
                f"{self.path} holds a run already: continue it with resume=auto, or choose another output="
            )
        if resuming:
            self._continue(recipe)
            for name in (*WRITTEN, JOURNAL) if owner else ():  # drafts of a job that was killed as it wrote
                for draft in self.path.glob(f".{name}.{'[0-9a-f]' * 32}"):
                    draft.unlink(missing_ok=True)
        self._sign()
        return resuming

    def _sign(self) -> str:
        with writing(self.path):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, signature().encode(), 0)
        return signature()

    def check(self) -> None:
        """The folder is still this run's. A lock that was merely removed is made again.

        Raises:
            FolderInUseError: another run has it.
            SetupError: it was removed, renamed or emptied.
        """
        with self._one_check:
            try:
                owner = read(self.path / LOCK, 1000).decode(errors="replace")
            except FileNotFoundError:
                if not os.path.lexists(self.path / "recipe.yaml"):
                    raise SetupError(
                        f"{self.path} was removed, renamed or emptied while its run was at work, which ends here and "
                        "saves nothing more: what it had saved can be continued wherever that is now, with resume=auto"
                    ) from None
                gone, self._lock = self._lock, locks.hold(self.path, "run", LOCK)
                os.close(gone)
                owner = os.pread(self._lock, 1000, 0).decode(errors="replace") or self._sign()
            except OSError as error:
                raise SetupError(f"{self.path / LOCK} cannot be read ({why(error)}); choose another output=") from None
        if owner != signature():
            raise FolderInUseError(
                f"{self.path} is another run's by now (its {LOCK} was removed): this one ends and saves no more"
            )

    def _saved(self) -> bool:
        """Whether the run here left what cannot be had again: a checkpoint, weights, a final result."""
        try:
            checkpoints = os.listdir(self.path / "checkpoints")
        except FileNotFoundError:
            checkpoints = []
        except OSError:
            return True
        weights = list(self.path.glob("*.safetensors"))
        done = self.previous_result(lambda text: None).get("status") == "completed"
        return done or bool(weights) or any(re.fullmatch(r"step-\d+", name) for name in checkpoints)

    def _clear(self, resume: str | None) -> None:
        """Remove what a run that saved nothing wrote, so that nothing of it mixes with the next.

        With resume=auto that is another attempt of the same run, which the journal counts.
        """
        written = (*WRITTEN, JOURNAL) if resume is None else WRITTEN
        for path in (path for pattern in written for path in self.path.glob(pattern)):
            with suppress(OSError):
                path.unlink()

    def _continue(self, recipe: Recipe) -> None:
        """Take what the run here settled, and hold the rest of its recipe against this one."""
        file = self.path / "recipe.yaml"
        if not os.path.lexists(file):
            return
        try:
            before = recipes.load(str(file))
        except RecipeError as error:
            advice = "remove that file to continue with the recipe that you give now"
            raise RecipeError(f"resume=auto: {file} cannot be used ({error}); {advice}") from None
        if word := computed_otherwise(recipe_files.read(file)):
            words = f"recipe={shlex.quote(str(self.path))} model.init_from={shlex.quote(str(self.path))}"
            raise RecipeError(
                f"resume=auto: {self.path} was trained with {word}, which is no more, and nothing else computes the "
                f"same; to train on from its weights type python -m trainer {words} output="
                f"{shlex.quote(f'{self.path}-longer')}"
            )
        self.resolved_keys = {
            f"data__{key}": getattr(before.data, key) for key in CHOSEN if getattr(recipe.data, key) is None
        }
        if recipe.model.init_from is not None and recipe.model.weights is None:
            self.resolved_keys["model__weights"] = before.model.weights
        if not recipe.schedule.restarts:
            self.resolved_keys["schedule__restart"] = before.schedule.restart
        changes = recipes.changed_keys(before, recipe.replace(**self.resolved_keys))
        if trains_longer(before, recipe):
            changes = {key: pair for key, pair in changes.items() if key not in ("epochs", "max_steps")}
            self.shorter = before
        if changes:
            listed = ", ".join(f"{key}: {old} there, {new} now" for key, (old, new) in list(changes.items())[:4])
            raise RecipeError(
                f"resume=auto: {self.path} was trained with another recipe ({listed}); "
                f"put it back, as recipe={self.path} does, or choose another output="
            )
        if self.shorter and recipe.schedule.restart is not True and (line := new_cosine(before, recipe)):
            raise RecipeError(f"resume=auto: {self.path} trains longer by {line}: add schedule.restart=true to have it")

    def write_recipe(self, recipe: Recipe) -> None:
        """recipe.yaml, resolved and re-runnable; a continued run keeps the one it has, unless it trains longer."""
        if self.shorter is not None or not os.path.lexists(self.path / "recipe.yaml"):
            again = recipe.replace(output=None, resume=None)
            write_atomically(self.path / "recipe.yaml", again.to_yaml())

    def write_result(self, result: Mapping[str, Any]) -> None:
        self.check()  # and again when it is written, which takes time
        text = json.dumps(result, indent=2, allow_nan=False, default=str) + "\n"
        write_atomically(self.path / "result.json", text, self.check)

    def previous_result(self, warn: Callable[[str], None]) -> dict[str, Any]:
        """What result.json holds from an earlier part of the run; empty where there is none."""
        return usable_json(self.path / "result.json", warn)

    def tuned(self, warn: Callable[[str], None]) -> dict[str, Any]:
        """What an earlier part of the run measured to choose how to run; empty where there is nothing."""
        return usable_json(self.path / "tuning.json", warn)

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:
        """Keep it for later parts."""
        if tuned:
            write_atomically(self.path / "tuning.json", json.dumps(tuned, indent=2) + "\n")

    def close(self) -> None:
        """Let go of the lock. A start that fails with a sentence leaves no trace of a folder that held no run."""
        if self._lock < 0:
            return
        with suppress(OSError):
            failed = isinstance(sys.exception(), TrainerError)
            if failed and self._first and not os.path.lexists(self.path / "recipe.yaml"):
                (self.path / JOURNAL).unlink(missing_ok=True)
                (self.path / LOCK).unlink()
                if self._made:
                    self.path.rmdir()
        os.close(self._lock)
        self._lock = -1


def asked_to_restart(recipe: Recipe) -> bool:
    """Whether the user, at a terminal, lets the run in `output` go on for longer by the new cosine that this takes."""
    if not (recipe.resume and recipe.output and sys.stdin and sys.stdin.isatty()) or recipe.schedule.restart is True:
        return False
    file, before = Path(recipe.output).expanduser() / "recipe.yaml", recipe
    with suppress(RecipeError):  # which is told once the folder is held
        before = recipes.load(str(file)) if file.is_file() else recipe
    line = new_cosine(before, recipe) if trains_longer(before, recipe) else None
    return line is not None and agreed("resume=auto", f"{recipe.output} trains longer by {line}", "train on?")


def fresh_folder(recipe: Recipe) -> Path:
    """Make runs/<recipe>-<mode>-<time>, or <model>-<data>-<mode>-<time> without a recipe's name.

    A restart of the same job finds the one it had.

    Raises:
        SetupError: it cannot be made.
    """
    name = f"{recipe.name}-{recipe.mode}"
    for lock in sorted(Path("runs").glob(f"{glob.escape(name)}-*/{LOCK}"), reverse=True) if is_restart() else ():
        with suppress(OSError, RecipeError):  # RecipeError: another run of that job
            before = lock.parent / "recipe.yaml"
            if not is_this_job(read(lock).decode(errors="replace")):
                continue
            changes = recipes.changed_keys(recipes.load(str(before)), recipe) if before.is_file() else {}
            if all(new is None for _, new in changes.values()):  # null is what a run's recipe has settled since
                return lock.parent
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = Path(stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise SetupError(f"{path} cannot be made ({error.strerror}); choose a folder with output=") from None

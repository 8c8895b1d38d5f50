"""The run folder: choose it, lock it for one job, and read and write its small files.

Only rank 0 has a run folder.
"""

import glob
import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer import recipe as recipes
from trainer.errors import FolderInUseError, RecipeError, SetupError, TrainerError
from trainer.processes.rank import build_signature, is_restart, is_this_job
from trainer.processes.terminal import Say, ask_permission
from trainer.recipe import Recipe, recipe_files
from trainer.recipe.reflection import REPORTED_ON_RESUME, describe_restart, is_longer
from trainer.recipe.removed import find_changed_setting
from trainer.recipe.text import format_value
from trainer.saving.files import (
    Json,
    describe_error,
    read,
    read_json_or_empty,
    report_write_errors,
    write_atomically,
    write_json,
)
from trainer.saving.journal import JOURNAL
from trainer.saving.locks import LOCK, lock_folder

# Keys of `data` that a run chooses, if the user leaves them open, before it writes its recipe.
CHOSEN = ("image_size", "channels", "mean", "std", "cache_format", "cache_size")
# File of the settings that a run has tuned, see `RunFolder.write_tuned`.
TUNED = "tuning.json"
# Prefix of the name of the temporary run folder of check=true.
CHECK = ".check-"
# Patterns of the files that a run may write before it saves anything. If a run ended without saving
# anything, they are removed when the next run starts in the same folder.
WRITTEN = (
    "recipe.yaml",
    "result.json",
    "steps.csv",
    "epochs.csv",
    "split.csv",
    "contact_sheet.png",
    TUNED,
    "skipped.csv",
    "worst.csv",
    "timeline.*",
    "*events.out.tfevents.*",
    "stacks-rank*.txt",
    "wandb.json",
    "mlflow.json",
)


class NullFolder:
    """Replacement for the run folder on ranks other than rank 0. All calls do nothing.

    Attributes:
        path: path of the folder; None on ranks other than rank 0.
        resuming: whether the run resumes from the newest good checkpoint of the folder.
        replaced: whether files of a run that had saved nothing were removed.
        shorter: recipe of the resumed run if this recipe trains longer; else None.
        reported_changes: keys that differ from those of the resumed run and may differ, with their
            (old, new) values.
        resolved_keys: values that the resumed run has chosen for keys that this recipe leaves open,
            by names such as "data__image_size".
    """

    path: Path | None = None
    resuming = False
    replaced = False
    shorter: Recipe | None = None

    def __init__(self) -> None:
        self.resolved_keys: dict[str, Any] = {}
        self.reported_changes: dict[str, tuple[Any, Any]] = {}

    def check(self) -> None: ...
    def write_tuned(self, tuned: Mapping[str, Any]) -> None: ...

    def read(self, name: str, warn: Say) -> Json:
        return {}


class RunFolder(NullFolder):
    """Folder that this process has locked until it exits."""

    path: Path

    def __init__(self, recipe: Recipe) -> None:
        """Choose and lock the folder: `output`, or runs/<recipe>-<mode>-<time>.

        Raises:
            FolderInUseError: the folder contains another run, or another process has locked it.
            RecipeError: the folder's run cannot be resumed with this recipe.
            DiskFullError, SetupError: the folder cannot be written.
        """
        super().__init__()
        self.path = choose_folder(recipe)
        self._is_new = recipe.output is None or not os.path.lexists(self.path)
        self._has_new_lock = not os.path.lexists(self.path / LOCK)
        # The lock file contains the signature of the job that owns the folder, or owned it last.
        self._lock = lock_folder(self.path, "run")
        # The signature is built now, because it names the launcher, which may exit before its ranks
        # have saved.
        self._signature = build_signature()
        # Training and the saver's thread call `check`, and may both find that the lock is missing.
        self._check_lock = threading.Lock()
        try:
            self.resuming = self._claim(recipe)
        except BaseException:
            self.close()
            raise

    def _claim(self, recipe: Recipe) -> bool:
        """Decide whether the folder's run is resumed, and sign the lock file for this job.

        The files of an earlier run that saved nothing are removed, so that they do not mix with the
        next run.

        Returns:
            Whether the run of the folder is resumed.
        """
        try:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace")
        # The lock file may be a pipe or a device, which cannot be read at an offset and names no
        # owner.
        except OSError:
            owner = ""
        has_run = any(os.path.lexists(self.path / name) for name in ("recipe.yaml", "result.json"))
        is_restarted = is_this_job(owner)
        # Files are removed only if a run has owned the folder. Otherwise the user wrote them.
        if owner and not is_restarted and not self._has_saved():
            # With resume=auto, the next run is another attempt of this one, so keep the journal.
            patterns = WRITTEN if recipe.resume else (*WRITTEN, JOURNAL)
            for pattern in patterns:
                for path in self.path.glob(pattern):
                    with suppress(OSError):
                        path.unlink()
            self.replaced = has_run
            has_run = False
        resuming = has_run and (recipe.resume == "auto" or is_restarted)
        if has_run and not resuming:
            raise FolderInUseError(
                f"{self.path} contains a run already: resume it with resume=auto, or choose "
                "another output="
            )
        if resuming:
            self._resume(recipe)
            # Remove the drafts that a job has left if it was killed while it wrote files.
            if owner:
                for name in (*WRITTEN, JOURNAL):
                    for draft in self.path.glob(f".{name}.{'[0-9a-f]' * 32}"):
                        draft.unlink(missing_ok=True)
        self._sign()
        return resuming

    def _sign(self) -> str:
        with report_write_errors(self.path):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, self._signature.encode(), 0)
        return self._signature

    def check(self) -> None:
        """Check that the folder still belongs to this run.

        A lock file that was removed is created again if no other run has claimed the folder.

        Raises:
            FolderInUseError: another run has claimed the folder.
            SetupError: the folder was removed, renamed or emptied, or its lock file cannot be read.
        """
        with self._check_lock:
            try:
                owner = read(self.path / LOCK, 1000).decode(errors="replace")
            except FileNotFoundError:
                if not os.path.lexists(self.path / "recipe.yaml"):
                    raise SetupError(
                        f"{self.path} was removed, renamed or emptied while its run was training. "
                        "The run ends and saves nothing more. If its files still exist in another "
                        "folder, resume it there with resume=auto"
                    ) from None
                removed_lock = self._lock
                self._lock = lock_folder(self.path, "run")
                os.close(removed_lock)
                owner = os.pread(self._lock, 1000, 0).decode(errors="replace") or self._sign()
            except OSError as error:
                raise SetupError(
                    f"{self.path / LOCK} cannot be read ({describe_error(error)}); choose another "
                    "output="
                ) from None
        if owner != self._signature:
            raise FolderInUseError(
                f"{self.path} belongs to another run now, because its {LOCK} was removed: this run "
                "ends and saves nothing more"
            )

    def _has_saved(self) -> bool:
        """Return whether the folder contains a checkpoint, weights or a final result.

        These cannot be reproduced without training again, so they are never removed.
        """
        try:
            checkpoints = os.listdir(self.path / "checkpoints")
        except FileNotFoundError:
            checkpoints = []
        except OSError:
            return True
        weights = list(self.path.glob("*.safetensors"))
        status = read_json_or_empty(self.path / "result.json").get("status")
        if status == "completed" or weights:
            return True
        return any(re.fullmatch(r"step-\d+", name) for name in checkpoints)

    def _resume(self, recipe: Recipe) -> None:
        """Check that the folder's run can be resumed with `recipe`.

        This sets `resolved_keys` to the values that the run has chosen, and `shorter` if `recipe`
        trains longer than the run.

        Raises:
            RecipeError: the run cannot be resumed with `recipe`.
        """
        file = self.path / "recipe.yaml"
        if not os.path.lexists(file):
            return
        try:
            before = recipes.load(file)
        except RecipeError as error:
            advice = "remove that file to resume with the recipe that you give now"
            raise RecipeError(f"resume=auto: {file} cannot be used ({error}); {advice}") from None
        removed_value = find_changed_setting(recipe_files.read_recipe_file(file))
        if removed_value:
            path = shlex.quote(str(self.path))
            longer = shlex.quote(f"{self.path}-longer")
            raise RecipeError(
                f"resume=auto: {self.path} was trained with {removed_value}, which was removed "
                "without a replacement that computes the same. To train from its weights, type "
                f"python -m trainer recipe={path} model.init_from={path} output={longer}"
            )
        for key in CHOSEN:
            if getattr(recipe.data, key) is None:
                self.resolved_keys[f"data__{key}"] = getattr(before.data, key)
        if recipe.model.init_from is not None:
            if recipe.model.weights is None:
                self.resolved_keys["model__weights"] = before.model.weights
            # The stored recipe also has the arguments of the model that the run started from.
            self.resolved_keys["model__args"] = before.model.args | recipe.model.args
        if not recipe.schedule.restarts:
            self.resolved_keys["schedule__restart"] = before.schedule.restart
        changes = recipes.changed_keys(before, recipe.replace(**self.resolved_keys))
        if is_longer(before, recipe):
            changes.pop("epochs", None)
            changes.pop("max_steps", None)
            self.shorter = before
        for key in list(changes):
            if key.startswith(f"{REPORTED_ON_RESUME}."):
                self.reported_changes[key] = changes.pop(key)
        if changes:
            first_changes = list(changes.items())[:4]
            listed = ", ".join(
                f"{key}: {old} there, {new} now" for key, (old, new) in first_changes
            )
            raise RecipeError(
                f"resume=auto: {self.path} was trained with another recipe ({listed}); "
                f"put it back, as recipe={self.path} does, or choose another output="
            )
        if self.shorter is None or recipe.schedule.restart is True:
            return
        cosine = describe_restart(before, recipe)
        if cosine:
            raise RecipeError(
                f"resume=auto: {self.path} would train longer by {cosine}: add "
                "schedule.restart=true to do so"
            )

    def write_recipe(self, recipe: Recipe) -> None:
        """Write recipe.yaml, from which the same run can be started again.

        A resumed run keeps its recipe.yaml unless it trains longer or with other augmentation.

        Args:
            recipe: recipe in which all keys that the user left open have values.
        """
        is_changed = self.shorter is not None or self.reported_changes
        if is_changed or not os.path.lexists(self.path / "recipe.yaml"):
            portable_recipe = recipe.replace(output=None, resume=None)
            write_atomically(self.path / "recipe.yaml", portable_recipe.to_yaml())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Replace result.json."""
        # Writing takes time, so check the folder again immediately before the replacement.
        self.check()
        write_json(self.path / "result.json", result, self.check)

    def read(self, name: str, warn: Say) -> Json:
        """Read a JSON file of the previous attempt. Return {} if it is missing or damaged.

        Args:
            name: name of the file in the run folder.
            warn: called with one line about a damaged file.
        """
        return read_json_or_empty(self.path / name, warn)

    def write_tuned(self, tuned: Mapping[str, Any]) -> None:
        """Save tuned settings, such as the number of micro-batches, for later attempts."""
        if tuned:
            write_json(self.path / TUNED, tuned)

    def close(self) -> None:
        """Release the lock.

        If the run fails before it has written a recipe, a folder and a lock that it has created are
        removed.
        """
        if self._lock < 0:
            return
        with suppress(OSError):
            has_failed = isinstance(sys.exception(), TrainerError)
            has_recipe = os.path.lexists(self.path / "recipe.yaml")
            if has_failed and self._has_new_lock and not has_recipe:
                (self.path / JOURNAL).unlink(missing_ok=True)
                (self.path / LOCK).unlink()
                if self._is_new:
                    self.path.rmdir()
        os.close(self._lock)
        self._lock = -1


def asked_to_restart(recipe: Recipe) -> bool:
    """Ask the user at a terminal whether a resumed run may train longer with a new cosine schedule.

    Returns:
        True if the user agrees. False if the user refuses, if there is no terminal, or if resuming
        the run in `output` does not need a new cosine.
    """
    if not recipe.resume or not recipe.output or recipe.schedule.restart is True:
        return False
    if not sys.stdin.isatty():
        return False
    file = Path(recipe.output).expanduser() / "recipe.yaml"
    before = recipe
    # A damaged recipe is reported later, when the folder is locked.
    with suppress(RecipeError):
        if file.is_file():
            before = recipes.load(file)
    if not is_longer(before, recipe):
        return False
    cosine = describe_restart(before, recipe)
    return cosine is not None and ask_permission(
        "resume=auto", f"{recipe.output} trains longer by {cosine}", "train on?"
    )


def choose_folder(recipe: Recipe) -> Path:
    """Return the folder `output`, or create a folder runs/<recipe>-<mode>-<time>.

    A recipe without a name is called <model>-<data>. A restart of the same job returns the folder
    that the job has created before.

    Raises:
        SetupError: the folder cannot be created.
    """
    if recipe.output:
        return Path(recipe.output).expanduser()
    name = f"{recipe.name}-{recipe.mode}"
    lock_files = []
    if is_restart():
        lock_files = sorted(Path("runs").glob(f"{glob.escape(name)}-*/{LOCK}"), reverse=True)
    for lock_file in lock_files:
        recipe_file = lock_file.parent / "recipe.yaml"
        # A folder whose lock file or recipe cannot be read is not used again.
        with suppress(OSError, RecipeError):
            if not is_this_job(read(lock_file).decode(errors="replace")):
                continue
            changes = {}
            if recipe_file.is_file():
                changes = recipes.changed_keys(recipes.load(recipe_file), recipe)
            # A key that differs only because it is null in this recipe was chosen by the earlier
            # attempt, so the recipe is the same.
            if all(new is None for _, new in changes.values()):
                return lock_file.parent
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(stem)
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = Path(f"{stem}-{number}")
        except OSError as error:
            raise SetupError(
                f"{path} cannot be made ({error.strerror}); choose a folder with output="
            ) from None


@contextmanager
def open_check_folder(recipe: Recipe, typed: str | None) -> Iterator[Path | None]:
    """Create the run folder of a run with check=true, and remove it at the end of this block.

    The folder is created in `output` if it exists, or else in its nearest existing parent, so that
    it is on the same disk.

    Args:
        recipe: recipe of the run.
        typed: value of the argument check: "true", "false", or None if it was not typed. A rank
            that our launcher started gets the path of the folder, which the launcher created and
            removes.

    Yields:
        The folder, or None without a check. If a user starts the ranks with torchrun, each rank
        creates a folder, and the run uses that of rank 0.

    Raises:
        RecipeError: `typed` has another value.
        DiskFullError, SetupError: the folder cannot be created.
    """
    if typed in (None, "false"):
        yield None
        return
    if typed and is_check_folder(Path(typed)):
        yield Path(typed)
        return
    if typed != "true":
        raise RecipeError(f"check={format_value(typed)} must be true or false")
    parent = Path(recipe.output or "runs").expanduser().absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    with report_write_errors(parent):
        temporary = tempfile.TemporaryDirectory(
            prefix=CHECK, dir=parent, ignore_cleanup_errors=True
        )
    with temporary as name:
        yield Path(name)


def is_check_folder(path: Path | None) -> bool:
    """Return whether `path` is the temporary run folder of a run with check=true."""
    return path is not None and path.name.startswith(CHECK)

"""The command `tensorboard`: show the curves of runs in a browser."""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile

from trainer.errors import RecipeError, SetupError
from trainer.saving.run_names import HOME, find_run


def command(words: Sequence[str]) -> int:
    """Replace this process by TensorBoard, so that its signals and exit code are TensorBoard's own.

    Args:
        words: runs to show, by path or by name below runs/, then TensorBoard's own arguments. If no
            run is named, the folder `runs` with all its runs is shown.

    Raises:
        CheckpointError: there is no such run.
        RecipeError: the paths of several runs have characters that TensorBoard does not allow.
        SetupError: no run is named, and there is no folder `runs`.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    folders = [str(find_run(name)) for name in names]
    arguments = list(words[len(names) :])
    option_names = {argument.partition("=")[0] for argument in arguments}
    if not folders and option_names.isdisjoint(("--logdir", "--logdir_spec")):
        if not os.path.isdir(HOME):
            raise SetupError(
                f"there is no folder {HOME} here: train a model first, or name a folder, as in "
                "python -m trainer tensorboard FOLDER"
            )
        folders = [HOME]
    if len(folders) == 1:
        arguments += ["--logdir", folders[0]]
    elif folders:
        if any(set(":,") & set(folder) for folder in folders):
            raise RecipeError(
                "TensorBoard cannot show several runs with : or , in their paths: type "
                "python -m trainer tensorboard FOLDER with the folder that contains them"
            )
        arguments += ["--logdir_spec", ",".join(f"{folder}:{folder}" for folder in folders)]
    # Other machines can connect only if the user allows it.
    if option_names.isdisjoint(("--host", "--bind_all")):
        arguments += ["--host", "127.0.0.1"]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tensorboard.main", *arguments])

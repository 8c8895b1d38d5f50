"""The table of commands, which dispatch, grammar and completion read."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the command line. The guide's page `commands` has a help section for each.

    Attributes:
        words: names of options that are not keys of a recipe. The parser accepts them, and shells
            complete them and the keys. If empty, shells complete only what `completion.sh` lists
            for the command, even if the command accepts options.
        wants: example of the required arguments; empty if no argument is required.
        alone: whether the command refuses to run as one of several tasks of mpirun or srun.
        home: module whose function `command` runs the command, unless `__main__` runs it. Empty:
            the module of this name in `trainer.commands`.
    """

    words: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    alone: bool = False
    home: str = ""


# Commands in the order of the overview and of the guide's page `commands`.
COMMANDS = {
    "train": Command(
        ("recipe", "nproc", "max_restarts", "plugin", "check"), wants=("recipe=digits",)
    ),
    "compare": Command(
        ("recipe", "modes", "repeats", "nproc", "plugin", "output", "resume", "steps"),
        wants=("recipe=digits",),
        alone=True,
    ),
    "sweep": Command(
        ("recipe", "repeats", "trials", "metric", "nproc", "plugin", "output", "resume"),
        wants=("recipe=digits", "optimizer.lr=[0.01,0.1]"),
        alone=True,
    ),
    "plan": Command(
        ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
        wants=("recipe=digits",),
        alone=True,
    ),
    "predict": Command(
        ("checkpoint", "plugin"),
        wants=("photo.jpg",),
        alone=True,
        home="trainer.commands.predict.predict_command",
    ),
    "evaluate": Command(("checkpoint", "plugin", "split", "output"), wants=("RUN",), alone=True),
    "export": Command(
        ("checkpoint", "format", "output", "plugin", "preprocess"),
        wants=("RUN", "format=onnx"),
        alone=True,
    ),
    "runs": Command(),
    "tensorboard": Command(alone=True),
    "cache": Command(alone=True),
    "doctor": Command(),
    "prove": Command(alone=True),
    "submit": Command(
        (
            "recipe",
            "nodes",
            "nproc",
            "cpus",
            "memory",
            "time",
            "partition",
            "account",
            "requeues",
            "max_restarts",
            "plugin",
            "check",
            "output",
            "resume",
        ),
        wants=("slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"),
        alone=True,
    ),
    "recipes": Command(),
    "guide": Command(home="trainer.cli.guide"),
    "completion": Command(home="trainer.cli.completion"),
    "version": Command(),
    "help": Command(),
}
OWN_WORDS = frozenset[str]().union(*(command.words for command in COMMANDS.values()))

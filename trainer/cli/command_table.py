"""The table of commands, which dispatch, grammar and completion read."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the command line. The guide's page `commands` has a help section for each.

    Attributes:
        home: module whose function `command` runs the command; empty if `__main__` runs it.
        words: names of options that are not keys of a recipe. The parser accepts them, and shells
            complete them and the keys. If empty, shells complete only what `completion.sh` lists
            for the command, even if the command accepts options.
        wants: example of the required arguments; empty if no argument is required.
        alone: whether the command refuses to run as one of several tasks of mpirun or srun.
    """

    home: str = ""
    words: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    alone: bool = False


# Commands in the order of the overview and of the guide's page `commands`.
COMMANDS = {
    "train": Command(
        words=("recipe", "nproc", "max_restarts", "plugin", "check"), wants=("recipe=digits",)
    ),
    "compare": Command(
        "trainer.commands.compare",
        ("recipe", "modes", "repeats", "nproc", "plugin", "output", "resume", "steps"),
        wants=("recipe=digits",),
        alone=True,
    ),
    "sweep": Command(
        "trainer.commands.sweep",
        ("recipe", "repeats", "trials", "metric", "nproc", "plugin", "output", "resume"),
        wants=("recipe=digits", "optimizer.lr=[0.01,0.1]"),
        alone=True,
    ),
    "plan": Command(
        "trainer.commands.plan",
        ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
        wants=("recipe=digits",),
        alone=True,
    ),
    "predict": Command(
        "trainer.commands.predict.predict_command",
        ("checkpoint", "plugin"),
        wants=("photo.jpg",),
        alone=True,
    ),
    "evaluate": Command(
        words=("checkpoint", "plugin", "split", "output"), wants=("RUN",), alone=True
    ),
    "export": Command(
        "trainer.commands.export",
        ("checkpoint", "format", "output", "plugin", "preprocess"),
        wants=("RUN", "format=onnx"),
        alone=True,
    ),
    "runs": Command("trainer.commands.runs"),
    "tensorboard": Command("trainer.commands.tensorboard", alone=True),
    "cache": Command("trainer.commands.cache", alone=True),
    "doctor": Command("trainer.commands.doctor"),
    "prove": Command("trainer.commands.prove", alone=True),
    "submit": Command(
        "trainer.commands.submit",
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
    "recipes": Command("trainer.commands.recipes"),
    "guide": Command("trainer.cli.guide"),
    "completion": Command("trainer.cli.completion"),
    "version": Command(),
    "help": Command(),
}
OWN_WORDS = frozenset[str]().union(*(command.words for command in COMMANDS.values()))

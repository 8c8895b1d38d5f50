"""The commands: one declaration for each, which dispatch, grammar and completion read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the command line; its help is its section of the guide's page `commands`."""

    home: str = ""  # the module whose `command` takes the words; empty: `__main__` itself
    words: tuple[str, ...] = ()  # its own, beside the keys of a recipe; without any it reads its words itself
    wants: tuple[str, ...] = ()  # what to type at least
    alone: bool = False  # refused as one of several tasks of mpirun or srun


COMMANDS = {
    "train": Command(words=("recipe", "nproc", "max_restarts", "plugin"), wants=("recipe=digits",)),
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
    "predict": Command("trainer.commands.predict", ("checkpoint", "plugin"), wants=("photo.jpg",), alone=True),
    "evaluate": Command(words=("checkpoint", "plugin", "split"), wants=("checkpoint=RUN",), alone=True),
    "export": Command("trainer.commands.export", wants=("RUN", "format=onnx"), alone=True),
    "runs": Command("trainer.commands.runs"),
    "cache": Command("trainer.data.cache.homes", alone=True),
    "doctor": Command("trainer.commands.doctor"),
    "prove": Command("trainer.commands.prove", alone=True),
    "submit": Command(
        "trainer.commands.submit",
        (
            *("recipe", "nodes", "nproc", "cpus", "memory", "time", "partition", "account", "requeues"),
            *("max_restarts", "plugin", "output", "resume"),
        ),
        wants=("slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"),
        alone=True,
    ),
    "recipes": Command("trainer.recipe.key_reference"),
    "guide": Command("trainer.cli.guide"),
    "completion": Command("trainer.cli.completion"),
    "version": Command(),
    "help": Command(),
}
OWN_WORDS = frozenset(word for command in COMMANDS.values() for word in command.words)  # of any command

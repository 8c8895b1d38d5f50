"""The commands, the words that they take besides the keys of a recipe, and what other programs call both."""

from __future__ import annotations

from collections.abc import Collection

from trainer.recipe.near_names import key_of_same_words
from trainer.recipe.other_names import OTHER_KEYS
from trainer.recipe.reflection import defaults, is_text, kinds, sections

COMMANDS = (
    "train", "compare", "sweep", "plan", "predict", "evaluate", "export", "runs", "cache", "doctor", "prove", "submit",
    "recipes", "guide", "completion", "version", "help",
)  # fmt: skip

# What people type first, and what to type: words of ours, or a sentence that stands for itself.
_TYPED = {
    "recipes": "list ls show configs models zoo available recipe-list list-recipes",
    "train recipe=digits": "fit start run learn training main",
    "evaluate checkpoint=RUN": "val test eval validate validation score valid test_only evaluation evaluate_only",
    "predict photo.jpg": "infer inference detect classify label prediction classification",
    "compare recipe=digits": "benchmark bench speed profile race comparison",
    "sweep recipe=digits optimizer.lr=[0.01,0.1]": "tune search multirun",
    "plan recipe=digits": "estimate dry-run dryrun dry_run memory simulate planning",
    "export RUN format=onnx": "convert onnx deploy",
    "export RUN format=torchscript": "torchscript jit trace",
    "export RUN format=safetensors": "safetensors",
    "runs": "logs history results experiments",
    "doctor": "info env collect_env check diagnose checks system status nvidia-smi gpus devices",
    "prove": "proof verify selftest self-test burnin burn-in health acceptance certify",
    "submit slurm recipe=digits nproc=2 time=01:00:00 cpus=8": "slurm sbatch srun batch",
    "guide nodes": "kubernetes k8s kubectl kubeflow",
    "guide": "docs doc documentation manual tutorial faq howto readme topics",
    "recipe=RUN output=RUN resume=auto": "resume continue restart",
    "help": "usage man commands ?",
    "completion bash": "bash zsh autocomplete complete shell",
    "version": "ver --ver about",
}
OTHER_COMMANDS = {name: words for words, names in _TYPED.items() for name in names.split()}
SENTENCES = {
    **dict.fromkeys(("tensorboard", "dashboard", "ui"), "python -m tensorboard.main --logdir runs shows all runs"),
    **dict.fromkeys(("segment", "pose", "track", "obb"), "task.name= is classification, multilabel or regression"),
    **dict.fromkeys(
        ("new", "init", "create", "config", "cfg", "make"),
        "python -m trainer recipes new my.yaml extends=digits writes a recipe to edit, and recipe=my.yaml trains it",
    ),
    **dict.fromkeys(("install", "setup", "update", "upgrade"), "./launch.sh installs what is missing as it starts"),
    **dict.fromkeys(("download", "data", "datasets"), "data is downloaded when a recipe first trains, as recipe=mnist"),
}
# Programs that somebody types before our words, or again.
PROGRAMS = ("python", "python3", "torchrun", "accelerate", "trainer", "./launch.sh", "launch.sh", "sudo", "yolo")
LAUNCHING = ("-m", "launch", "torch.distributed.run", "torch.distributed.launch")  # and what stands between
# Options that are commands elsewhere: torchvision's --test-only, timm's --list-models.
_FLAGS = {
    "evaluate": "test_only eval_only evaluate eval validate test val do_eval",
    "predict": "predict infer do_predict",
    "recipes NAME": "print_config show_config",
    "recipes": "list list_models list_recipes ls",
    "plan": "dry_run dryrun plan",
    "compare": "benchmark bench compare",
    "sweep": "multirun m",
    "doctor": "doctor info",
    "train": "do_train train",
    "help": "help_all helpfull help_full",
}
AFTERWARDS = {  # of those, what there is to say where training is asked for as well
    "evaluate": "every epoch ends with an evaluation",
    "predict": "a command of its own, for a trained run",
}
FLAG_COMMANDS = {name: command for command, names in _FLAGS.items() for name in names.split()}


# Words of commands that no recipe holds.
COMMAND_WORDS = {
    "train": ("recipe", "nproc", "max_restarts", "plugin"),
    "compare": ("recipe", "modes", "repeats", "sweep", "nproc", "plugin", "output", "resume", "steps"),
    "sweep": ("recipe", "repeats", "trials", "nproc", "plugin", "output", "resume"),
    "plan": ("recipe", "plugin", "nproc", "memory", "measured", "bandwidth"),
    "submit": (
        "recipe", "nodes", "nproc", "cpus", "memory", "time", "partition", "account", "array", "requeues",
        "max_restarts", "plugin", "output", "resume",
    ),
    "predict": ("checkpoint", "plugin"),
    "evaluate": ("checkpoint", "plugin", "split"),
}  # fmt: skip
EVERY_WORD = frozenset(word for words in COMMAND_WORDS.values() for word in words)
WANTS: dict[str, tuple[str, ...]] = {
    "train": ("recipe=digits",),
    "plan": ("recipe=digits",),
    "compare": ("recipe=digits",),
    "sweep": ("recipe=digits", "optimizer.lr=[0.01,0.1]"),
    "submit": ("slurm", "recipe=digits", "nproc=2", "time=01:00:00", "cpus=8"),
    "predict": ("photo.jpg",),
    "evaluate": ("checkpoint=RUN",),
}  # what each needs at least
EXPORTS = ("onnx", "exported_program", "torchscript", "safetensors")  # what export's format= can be
FOLDERS = ("recipe", "checkpoint", "data.root", "data.labels", "output", "model.init_from")  # hold paths


def our_name(name: str, options: Collection[str]) -> str:
    """What a key, a section or one of a command's `options` is called here; empty where no program has such a name."""
    if name in defaults() or name in sections() or name in options:
        return name
    within = [key for key in defaults() if key.endswith(f".{name.lower()}")]
    return OTHER_KEYS.get(name.lower()) or (within[0] if len(within) == 1 else "") or key_of_same_words(name)


def is_path_or_text(name: str) -> bool:
    """Whether a word's value is taken as it stands: a path, or any text."""
    return name in FOLDERS or (is_text(name) and list not in kinds()[name])


def is_name(name: str) -> bool:
    """Whether `name` is a key, a section or a word of ours, or what other programs call one."""
    return bool(our_name(name, EVERY_WORD))

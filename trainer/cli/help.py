"""What `--help` prints: a first page, and one for each command with its words and examples."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.cli.grammar import program
from trainer.recipe.versions import VERSION, installed

RECIPE = {"recipe=NAME": "a shipped recipe (recipes lists them), a YAML file or a run folder"}
NPROC = {"nproc=N": "processes on this machine (default: one a GPU; without one, two)"}
PLUGIN = {"plugin=MODULE": "your own module, which registers models, data sets and tasks"}
KEY = {"key=value": "any key of the recipe, as in optimizer.lr=0.05; all: python -m trainer recipes keys"}
KEYS = "  python -m trainer recipes keys explains every key, python -m trainer guide answers questions"
CHECKPOINT = {"checkpoint=RUN": "a run folder, one of its checkpoints or a .safetensors file"}


@dataclass(frozen=True)
class Page:
    """Help for one command: how it is called, what it does, its words, and lines to type as they are."""

    usage: str
    about: str
    words: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[str, ...] = ()


PAGES = {
    "train": Page(
        "[train] recipe=NAME [key=value ...]",
        "Train a model. The run folder holds weights, checkpoints, TensorBoard's page and result.json.",
        {
            **RECIPE,
            **NPROC,
            **PLUGIN,
            **KEY,
            "mode=ddp": "how devices are used: ddp, single, dp, split, pipeline, local_sgd, hogwild",
            "epochs=5": "passes over the training images; max_steps=100 ends earlier",
            "batch_size=128": "images a step, over all devices",
            "optimizer.lr=0.1": "learning rate; optimizer.name= is sgd, adam, adamw, muon or lars",
            "model.name=resnet18": "a small model (cnn, vit_tiny, ...) or one of torchvision's classifiers",
            "data.root=FOLDER": "where the images lie: FOLDER/train/<class>/*.jpg and FOLDER/val/<class>/*.jpg",
            "precision=bf16": "fp32, tf32, bf16 or fp16",
            "devices=[cuda:0]": "which devices; auto takes all",
            "output=FOLDER": "the run folder (default: a new one in runs)",
            "resume=auto": "continue the run in output=",
        },
        (
            "python -m trainer recipe=digits",
            "python -m trainer recipe=digits mode=single epochs=2 output=runs/first",
            "python -m trainer recipe=digits output=runs/first mode=single epochs=2 resume=auto",
            "python -m trainer recipe=finetune data.root=photos",
            "torchrun --nproc_per_node=4 -m trainer recipe=resnet50 data.root=/data/imagenet",
        ),
    ),
    "compare": Page(
        "compare recipe=NAME [modes=[single,ddp]] [key=value ...]",
        "Which mode is fastest on this machine: every mode several times, in turn, and a table with pictures.",
        {
            **RECIPE,
            "modes=[single,ddp]": "the modes (default: all), also with words: '[ddp, ddp precision=bf16]'",
            "sweep=KEY:[a,b]": "every mode at each value of one key",
            "repeats=5": "runs of each (default: 5, more where they differ little)",
            "steps=100": "measured steps of a run (default: about four seconds' worth)",
            **NPROC,
            **PLUGIN,
            **KEY,
            "output=FOLDER": "the comparison's folder; resume=auto continues it",
        },
        (
            "python -m trainer compare recipe=digits",
            "python -m trainer compare recipe=digits 'modes=[single,ddp]' nproc=2",
            "python -m trainer compare recipe=digits 'modes=[single]' 'sweep=batch_size:[96,192]'",
        ),
    ),
    "plan": Page(
        "plan recipe=NAME [key=value ...]",
        "What a run would take, without running it: memory, traffic, schedule, whether it fits, what to type.",
        {
            **RECIPE,
            **NPROC,
            "memory=24GiB": "of each GPU, here or not; of CPUs with devices=[cpu] (default: this machine's)",
            "measured=here": "predict the speed from a few seconds of computing here, or from a run: measured=runs/x",
            "bandwidth=10GB/s": "between devices (default: measured)",
            **PLUGIN,
            **KEY,
            "--json": "the plan as JSON",
        },
        (
            "python -m trainer plan recipe=resnet50 'devices=[cuda:0,cuda:1]' memory=24GiB",
            "python -m trainer plan recipe=digits mode=pipeline nproc=2",
            "python -m trainer plan recipe=digits mode=single measured=here",
        ),
    ),
    "predict": Page(
        "predict checkpoint=RUN data.root=FOLDER [key=value ...]",
        "Label images on every device: a table with a line an image, in their order.",
        {
            **CHECKPOINT,
            "data.root=FOLDER": "a folder of images, one image, a list of paths, or - for paths from a pipe",
            "predict.format=csv": "or jsonl",
            "predict.batch_size=64": "images at a time (default: what each device does best)",
            "predict.split=val": "the data set's own images instead of data.root's",
            "model.weights=DEFAULT": "torchvision's published weights instead of checkpoint=, with model.name=",
            **PLUGIN,
            "output=FOLDER": "where predictions.csv goes (default: a new one in runs)",
        },
        (
            "python -m trainer predict checkpoint=runs/first data.root=photos",
            "python -m trainer predict checkpoint=runs/first predict.split=val",
            "python -m trainer predict model.name=resnet50 model.weights=DEFAULT data.root=photos",
        ),
    ),
    "evaluate": Page(
        "evaluate checkpoint=RUN [key=value ...]",
        "Evaluate a trained run again, on its own held-out images or on others.",
        {
            **CHECKPOINT,
            "data.root=FOLDER": "other images",
            "batch_size=256": "images at a time; no figure depends on it",
            **PLUGIN,
        },
        (
            "python -m trainer evaluate checkpoint=runs/first",
            "python -m trainer evaluate checkpoint=runs/first/best.safetensors",
            "torchrun --nproc_per_node=2 -m trainer evaluate checkpoint=runs/first",
        ),
    ),
    "export": Page(
        "export RUN format=onnx [key=value ...]",
        "Write a trained model as a file for other programs, and check that its outputs are the model's.",
        {
            "RUN": "a run folder, a name below runs, a checkpoint or a .safetensors file",
            "format=onnx": "or exported_program, torchscript, safetensors",
            "output=FILE": "where it goes (default: beside the weights)",
            **PLUGIN,
        },
        (
            "python -m trainer export runs/first format=onnx",
            "python -m trainer export runs/first output=model.pt2",
        ),
    ),
    "runs": Page(
        "runs [show RUN | compare RUN RUN | delete RUN]",
        "List the runs below the folder runs: mode, status, best figure, images/s, age and size.",
        {
            "FOLDER": "list another folder",
            "show RUN": "one run on a page",
            "compare RUN RUN": "what differed, the figures side by side, and the curves in one picture",
            "delete RUN": "remove runs; yes=true does not ask",
            "--json": "the same as JSON",
        },
        (
            "python -m trainer runs",
            "python -m trainer runs show runs/first",
            "python -m trainer runs compare runs/first runs/second",
        ),
    ),
    "cache": Page(
        "cache [build recipe=NAME data.root=FOLDER | verify [CACHE] | delete CACHE]",
        "List the caches of photos that data.cache=disk makes; make one beforehand, look for damage, remove them.",
        {
            "build recipe=NAME": "make what a run with these words would make at its start",
            "verify CACHE": "read all of it (default: of every cache); damage is removed, and made anew when used",
            "delete CACHE": "remove caches, by name or the beginning of one; yes=true does not ask",
            "data.cache_dir=FOLDER": "where they are (default: ~/.cache/trainer/cache)",
        },
        (
            "python -m trainer cache",
            "python -m trainer cache build recipe=finetune data.root=photos",
            "python -m trainer cache verify",
        ),
    ),
    "doctor": Page(
        "doctor",
        "What this machine offers to training, and what is wrong with it, ready to paste. It repairs nothing.",
        examples=("python -m trainer doctor",),
    ),
    "prove": Page(
        "prove [minutes=10] [devices=[...]] [output=FOLDER]",
        "Does this machine train right, and how fast? Ends with one line, a page to paste and a picture.",
        {
            "minutes=10": "how long it may take; what does not fit is left out, and named beforehand",
            "devices=[cpu,cpu]": "what is proven (default: every GPU; without one, two processes on the CPU)",
            "output=FOLDER": "where the report goes (default: runs/proof); the same words continue what was stopped",
        },
        (
            "python -m trainer prove",
            "python -m trainer prove minutes=60",
            "python -m trainer prove 'devices=[cpu,cpu]' minutes=5 output=runs/cpus",
        ),
    ),
    "recipes": Page(
        "recipes [NAME] [key=value ...]",
        "List the recipes that come with the package, or print one with every key explained.",
        {
            "NAME": "a shipped recipe, a YAML file or a run folder",
            "key=value": "on top of it",
            "diff ONE OTHER": "the keys in which two recipes differ",
            "new FILE extends=NAME": "write a short file to start from",
            "keys [SECTION or KEY]": "what each key means, its default and what it takes",
            "schema": "the JSON Schema that editors check files with",
        },
        (
            "python -m trainer recipes",
            "python -m trainer recipes resnet50",
            "python -m trainer recipes diff resnet50 resnet50_8gpu",
            "python -m trainer recipes new my.yaml extends=digits epochs=3",
            "python -m trainer recipes keys optimizer",
        ),
    ),
    "guide": Page(
        "guide [TOPIC]",
        "Answers by question: which mode, out of memory, several nodes, your photos, how to resume, and more.",
        {"TOPIC": "one of those that guide lists; any other word finds the nearest ones"},
        (
            "python -m trainer guide",
            "python -m trainer guide modes",
        ),
    ),
    "completion": Page(
        "completion bash|zsh",
        "Print what lets the Tab key complete commands, recipes, runs, keys and values.",
        examples=(
            "python -m trainer completion bash > ~/.trainer-completion; source ~/.trainer-completion",
            "python -m trainer completion zsh > ~/.trainer-completion; source ~/.trainer-completion",
        ),
    ),
    "version": Page(
        "version",
        "Print the versions of trainer and torch and Python.",
        examples=("python -m trainer version",),
    ),
    "help": Page(
        "help [COMMAND]",
        "Print this, or a command's words and examples.",
        examples=("python -m trainer help train",),
    ),
}


def first(recipes: str) -> str:
    """The first page, with the recipes' lines."""
    shown = {page.usage.partition(" [")[0]: re.split("[:.,]", page.about)[0] for page in PAGES.values()}
    width = max(map(len, shown))
    lines = ["usage: python -m trainer COMMAND [key=value ...]        COMMAND --help tells more", ""]
    lines += [f"  {usage:<{width}}  {about}" for usage, about in shown.items()]
    lines += ["", "  --key=value, --key value and key = value are read as key=value", KEYS, "", "recipes:", recipes, ""]
    lines += ["examples:", *(f"  {line}" for line in (*PAGES["train"].examples[:2], PAGES["train"].examples[-1]))]
    return _called("\n".join(lines)) + "\n"


def page(command: str) -> str:
    """One command's page."""
    about = PAGES[command]
    lines = [f"usage: python -m trainer {about.usage}", "", about.about]
    width = max((len(word) for word in about.words), default=0)
    lines += ["", *(f"  {word:<{width}}  {text}" for word, text in about.words.items())] if about.words else []
    lines += ["", "examples:", *(f"  {line}" for line in about.examples)]
    return _called("\n".join(lines)) + "\n"


def version_line() -> str:
    """Versions, without importing torch."""
    return f"trainer {VERSION}, torch {installed('torch')}, Python {platform.python_version()}"


def _called(text: str) -> str:
    """A page with the program's name as it was typed."""
    return "\n".join(
        line if "torchrun" in line else line.replace("python -m trainer", program()) for line in text.split("\n")
    )

"""Headers of shipped recipes are true: the launch line, the source, and the settings of that
source.
"""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from trainer.recipe import MODES, checks, flatten, load, shipped_recipes
from trainer.recipe.checks import check_names
from trainer.recipe.recipe_files import split_arguments

IMAGENET = [
    "resnet18",
    "resnet50",
    "resnet50_8gpu",
    "resnet50_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
]
IMAGENET += ["convnext_tiny", "swin_t", "vit_b_16"]


def header(name: str) -> dict[str, str]:
    """The entries of a recipe's header, in order, each on one line."""
    entries: dict[str, str] = {}
    last = ""
    for line in shipped_recipes()[name].read_text(encoding="utf-8").splitlines()[2:]:
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if actual := re.match(r"(Launch|Expect|Source|Differs): +", text):
            last = actual[1]
            entries[last] = text[actual.end() :]
        elif text:
            entries[last] += f" {text}"
    return entries


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_launch_line_runs_this_recipe(name: str) -> None:
    words = shlex.split(header(name)["Launch"].partition(" (")[0])
    begin = words.index("trainer")
    own, rest = split_arguments(words[begin + 1 :], ("recipe", "nproc"))
    assert own.pop("recipe") == name
    recipe = load(name, *rest)
    check_names(recipe)
    ranks = [
        word.partition("=")[2] for word in words[:begin] if word.startswith("--nproc_per_node=")
    ]
    usual = 2 if recipe.processes == "many" else 1
    checks.check_processes(recipe, int(next(iter(ranks), own.get("nproc", usual))))


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_header_has_an_accuracy_and_its_source(name: str) -> None:
    header_values = header(name)
    assert [*header_values] == [
        key for key in ("Launch", "Expect", "Source", "Differs") if key in header_values
    ]
    assert header_values["Expect"]
    if "not trained" in header_values["Expect"] and name != "mnist_local_sgd":
        assert header_values["Source"] and header_values["Differs"]


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_recipes_name_a_figure_and_its_source(name: str) -> None:
    header_values = header(name)
    assert re.search(r"\d\d(\.\d+)? % top-1", header_values["Expect"])
    assert "not trained" in header_values["Expect"]
    assert re.search(r"torchvision's|arXiv:", header_values["Source"]) and header_values["Differs"]
    assert load(name).data.missing == "synthetic"  # The recipe measures speed without data.root.


def test_the_figures_are_those_of_torchvision() -> None:
    """The installed torchvision publishes the accuracies with its weights."""
    from torchvision.models import get_weight

    for name in IMAGENET:
        header_values = header(name)
        weights = re.search(r"torchvision's (\w+_Weights\.\w+)", header_values["Source"])
        if weights:
            metrics = get_weight(weights[1]).meta["_metrics"]["ImageNet-1K"]
            assert f"{metrics['acc@1']:.2f} %" in header_values["Expect"], name
            if "top-5" in header_values["Expect"]:
                assert f"{metrics['acc@5']:.2f} %" in header_values["Expect"], name


def test_every_mode_has_a_recipe() -> None:
    for mode in MODES:
        recipe = load("digits" if mode == "ddp" else f"digits_{mode}")
        assert recipe.mode == mode and recipe.data.name == "digits"


def test_recipes_show_only_what_differs() -> None:
    """No key repeats the value that it has without the line."""
    for name, path in shipped_recipes().items():
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        parent = own.pop("extends", None)
        if parent is None:
            continue
        inherited = flatten(load(parent).to_dict())
        for key, value in flatten(own).items():
            assert inherited[key] != value, f"{name}: {key}={value} is {parent}'s already"


PUBLISHED = {  # references/classification of torchvision, whose batch is for each of its 8 GPUs
    "resnet50": """
        batch_size=256 epochs=90 accumulate=1 ema=null loss.label_smoothing=0
        optimizer.name=sgd optimizer.lr=0.1
        optimizer.momentum=0.9 optimizer.nesterov=false optimizer.weight_decay=1e-4
        optimizer.norm_weight_decay=null
        schedule.name=step schedule.step_epochs=30 schedule.gamma=0.1 schedule.warmup_epochs=0""",
    "resnet50_v2": """
        batch_size=1024 epochs=600 optimizer.lr=0.5 optimizer.weight_decay=2e-5
        optimizer.norm_weight_decay=0
        schedule.name=cosine schedule.warmup_epochs=5 loss.label_smoothing=0.1
        augment.auto=trivial augment.erase=0.1 augment.mixup=0.2 augment.cutmix=1""",
    "vit_b_16": """
        batch_size=4096 epochs=300 optimizer.name=adamw optimizer.lr=0.003
        optimizer.weight_decay=0.3
        optimizer.nesterov=false schedule.warmup_epochs=30
        schedule.warmup_factor=0.033 clip_grad_norm=1
        augment.auto=rand augment.mixup=0.2 augment.cutmix=1 loss.label_smoothing=0.11""",
    "swin_t": """
        batch_size=1024 epochs=300 optimizer.name=adamw optimizer.lr=0.001
        optimizer.weight_decay=0.05
        optimizer.norm_weight_decay=0 schedule.warmup_epochs=20 schedule.min_lr=1e-5
        clip_grad_norm=5
        augment.auto=trivial augment.mixup=0.8 augment.erase=0.25""",
    "convnext_tiny": """
        batch_size=1024 epochs=600 optimizer.name=adamw optimizer.lr=0.001
        optimizer.weight_decay=0.05""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvisions_recipes_are_set_as_published(name: str) -> None:
    assert load(name, *PUBLISHED[name].split()).to_dict() == load(name).to_dict()


def test_the_smaller_resnet_differs_in_its_model_alone() -> None:
    assert load("resnet18").replace(model__name="resnet50").to_dict() == load("resnet50").to_dict()


def test_the_recipe_for_8_gpus_scales_the_rate_with_the_batch() -> None:
    """The linear rule of Goyal et al., arXiv:1706.02677: 0.1 for 256 images, and the warm-up starts
    there.
    """
    big = load("resnet50_8gpu")
    small = load("resnet50")
    assert big.optimizer.lr == pytest.approx(small.optimizer.lr * big.batch_size / small.batch_size)
    assert big.optimizer.lr * big.schedule.warmup_factor == pytest.approx(small.optimizer.lr)
    assert (big.precision, big.compile, big.channels_last, big.schedule.warmup_epochs) == (
        "bf16",
        True,
        True,
        5,
    )
    assert big.batch_size // 8 >= checks.ENOUGH_IMAGES
    four = re.search(r"\(4 GPUs: (.*?)\)", header("resnet50_8gpu")["Launch"])
    assert four
    fewer = load("resnet50_8gpu", *four[1].split())
    assert fewer.optimizer.lr / fewer.batch_size == pytest.approx(big.optimizer.lr / big.batch_size)

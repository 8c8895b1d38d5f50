"""What the header of a shipped recipe tells holds: its launch line, its source, and the settings of that source."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from trainer.recipe import MODES, checks, flatten, load, shipped_recipes
from trainer.recipe.known_names import check_names
from trainer.recipe.recipe_files import split_words

IMAGENET = ["resnet18", "resnet50", "resnet50_8gpu", "resnet50_v2", "mobilenet_v3_large", "efficientnet_b0"]
IMAGENET += ["convnext_tiny", "swin_t", "vit_b_16"]
A_MODE = {  # one recipe a mode, on the digits
    "single": "digits_single",
    "dp": "digits_dp",
    "ddp": "digits",
    "split": "digits_split",
    "pipeline": "digits_pipeline",
    "fsdp": "digits_fsdp",
    "local_sgd": "digits_local_sgd",
    "hogwild": "digits_hogwild",
}


def header(name: str) -> dict[str, str]:
    """The entries of a recipe's header, in order, each on one line."""
    entries: dict[str, str] = {}
    last = ""
    for line in shipped_recipes()[name].read_text(encoding="utf-8").splitlines()[2:]:
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if found := re.match(r"(Launch|Expect|Source|Differs): +", text):
            last = found[1]
            entries[last] = text[found.end() :]
        elif text:
            entries[last] += f" {text}"
    return entries


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_launch_line_runs_this_recipe(name: str) -> None:
    words = shlex.split(header(name)["Launch"].partition(" (")[0])
    begin = words.index("trainer")
    own, rest = split_words(words[begin + 1 :], ("recipe", "nproc"))
    assert own.pop("recipe") == name
    recipe = load(name, *rest)
    check_names(recipe)
    ranks = [word.partition("=")[2] for word in words[:begin] if word.startswith("--nproc_per_node=")]
    usual = 2 if recipe.processes == "many" else 1
    checks.check_processes(recipe, int(next(iter(ranks), own.get("nproc", usual))))


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_header_tells_what_to_expect_and_says_where_that_is_from(name: str) -> None:
    told = header(name)
    assert [*told] == [key for key in ("Launch", "Expect", "Source", "Differs") if key in told]
    assert told["Expect"]
    if "not trained here" in told["Expect"] and name != "mnist_local_sgd":
        assert told["Source"] and told["Differs"]


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_recipes_name_a_figure_and_its_source(name: str) -> None:
    told = header(name)
    assert re.search(r"\d\d(\.\d+)? % top-1", told["Expect"]) and "not trained here" in told["Expect"]
    assert re.search(r"torchvision's|arXiv:", told["Source"]) and told["Differs"]
    assert load(name).data.missing == "synthetic"  # without data.root it measures speed


def test_the_figures_are_those_of_torchvision() -> None:
    """As the installed torchvision publishes them with its weights."""
    from torchvision.models import get_weight

    for name in IMAGENET:
        told = header(name)
        weights = re.search(r"torchvision's (\w+_Weights\.\w+)", told["Source"])
        if weights:
            metrics = get_weight(weights[1]).meta["_metrics"]["ImageNet-1K"]
            assert f"{metrics['acc@1']:.2f} %" in told["Expect"], name
            if "top-5" in told["Expect"]:
                assert f"{metrics['acc@5']:.2f} %" in told["Expect"], name


def test_every_mode_has_a_recipe() -> None:
    assert [*A_MODE] == [*MODES]
    for mode, name in A_MODE.items():
        assert load(name).mode == mode and load(name).data.name == "digits"


def test_recipes_show_only_what_differs() -> None:
    """No key is said again with the value that it has without."""
    for name, path in shipped_recipes().items():
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        parent = own.pop("extends", None)
        if parent is None:
            continue
        inherited = flatten(load(parent).to_dict())
        for key, value in flatten(own).items():
            assert inherited[key] != value, f"{name}: {key}={value} is {parent}'s already"


def test_torchvisions_recipes_are_set_as_published() -> None:
    """references/classification of torchvision, whose batch is for each of its 8 GPUs."""
    first = load("resnet50")
    assert (first.batch_size, first.epochs, first.accumulate) == (8 * 32, 90, 1)
    sgd = first.optimizer
    assert (sgd.name, sgd.lr, sgd.momentum, sgd.nesterov) == ("sgd", 0.1, 0.9, False)
    assert (sgd.weight_decay, sgd.norm_weight_decay) == (1e-4, None)
    assert (first.schedule.name, first.schedule.step_epochs, first.schedule.gamma) == ("step", 30, 0.1)
    assert (first.schedule.warmup_epochs, first.loss.label_smoothing, first.ema) == (0, 0, None)
    assert load("resnet18").replace(model__name="resnet50").to_dict() == first.to_dict()

    newer = load("resnet50_v2")
    assert (newer.batch_size, newer.epochs, newer.optimizer.lr) == (8 * 128, 600, 0.5)
    assert (newer.optimizer.weight_decay, newer.optimizer.norm_weight_decay) == (2e-5, 0)
    assert (newer.schedule.name, newer.schedule.warmup_epochs, newer.loss.label_smoothing) == ("cosine", 5, 0.1)
    augment = newer.augment
    assert (augment.auto, augment.erase, augment.mixup, augment.cutmix) == ("trivial", 0.1, 0.2, 1.0)

    vit = load("vit_b_16")
    assert (vit.batch_size, vit.epochs, vit.optimizer.name) == (8 * 512, 300, "adamw")
    assert (vit.optimizer.lr, vit.optimizer.weight_decay, vit.clip_grad_norm) == (0.003, 0.3, 1)
    assert (vit.schedule.warmup_epochs, vit.schedule.warmup_factor) == (30, 0.033)
    assert (vit.augment.auto, vit.augment.mixup, vit.augment.cutmix) == ("rand", 0.2, 1.0)
    assert (vit.loss.label_smoothing, vit.optimizer.nesterov) == (0.11, False)

    swin = load("swin_t")
    assert (swin.batch_size, swin.epochs, swin.optimizer.name) == (8 * 128, 300, "adamw")
    assert (swin.optimizer.lr, swin.optimizer.weight_decay, swin.optimizer.norm_weight_decay) == (0.001, 0.05, 0)
    assert (swin.schedule.warmup_epochs, swin.schedule.min_lr, swin.clip_grad_norm) == (20, 1e-5, 5)
    assert (swin.augment.auto, swin.augment.mixup, swin.augment.erase) == ("trivial", 0.8, 0.25)

    convnext = load("convnext_tiny")
    assert (convnext.batch_size, convnext.epochs, convnext.optimizer.lr) == (8 * 128, 600, 0.001)
    assert (convnext.optimizer.name, convnext.optimizer.weight_decay) == ("adamw", 0.05)


def test_the_recipe_for_8_gpus_scales_the_rate_with_the_batch() -> None:
    """The linear rule of Goyal et al., arXiv:1706.02677: 0.1 for 256 images, and the warm-up starts there."""
    big, small = load("resnet50_8gpu"), load("resnet50")
    assert big.optimizer.lr == pytest.approx(small.optimizer.lr * big.batch_size / small.batch_size)
    assert big.optimizer.lr * big.schedule.warmup_factor == pytest.approx(small.optimizer.lr)
    assert (big.precision, big.compile, big.channels_last, big.schedule.warmup_epochs) == ("bf16", True, True, 5)
    assert big.batch_size // 8 >= checks.ENOUGH_IMAGES
    four = re.search(r"\(4 GPUs: (.*?)\)", header("resnet50_8gpu")["Launch"])
    assert four
    fewer = load("resnet50_8gpu", *four[1].split())
    assert fewer.optimizer.lr / fewer.batch_size == pytest.approx(big.optimizer.lr / big.batch_size)

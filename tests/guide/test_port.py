"""The page `port`: what its tables tell to type instead of options of other programs."""

import re
import shlex

import pytest

from tests.guide.documents import cells
from tests.pages import GUIDE
from trainer.data.transforms import build_transforms
from trainer.recipe import load, notes_on_idle
from trainer.recipe.checks import check_names, check_options
from trainer.recipe.recipe_files import split_arguments

# Options of the argument parser of torchvision's references/classification/train.py.
TORCHVISION = """
data-path model device batch-size epochs workers opt lr momentum weight-decay wd norm-weight-decay
bias-weight-decay transformer-embedding-decay label-smoothing mixup-alpha cutmix-alpha lr-scheduler
lr-warmup-epochs lr-warmup-method lr-warmup-decay lr-step-size lr-gamma lr-min print-freq output-dir
resume start-epoch cache-dataset sync-bn test-only auto-augment ra-magnitude augmix-severity
random-erase amp world-size dist-url model-ema model-ema-steps model-ema-decay
use-deterministic-algorithms interpolation val-resize-size val-crop-size train-crop-size
clip-grad-norm ra-sampler ra-reps weights backend use-v2
"""
# Arguments of Lightning's Trainer.
LIGHTNING = """
accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
max_steps min_steps max_time limit_train_batches limit_val_batches overfit_batches
val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches
gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode
use_distributed_sampler profiler detect_anomaly barebones plugins sync_batchnorm
reload_dataloaders_every_n_epochs default_root_dir
"""
# Settings of Ultralytics that `yolo classify train` reads.
ULTRALYTICS = """
model data epochs time patience batch imgsz save save_period cache device workers project name
exist_ok pretrained optimizer verbose seed deterministic single_cls rect cos_lr close_mosaic resume
amp fraction profile freeze multi_scale compile dropout val plots lr0 lrf momentum weight_decay
warmup_epochs warmup_momentum warmup_bias_lr nbs hsv_h hsv_s hsv_v degrees translate scale shear
perspective flipud fliplr bgr mosaic mixup cutmix copy_paste auto_augment erasing cfg cls_pw
"""
NAMES = {"torchvision": TORCHVISION, "Lightning": LIGHTNING, "Ultralytics": ULTRALYTICS}


def rows(program):
    """Return the rows (theirs, ours) of a program's table."""
    page = (GUIDE / "port.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page, flags=re.M)
    [text] = [part for part in section if part.startswith(f"{program}\n")]
    table = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    return table[2:]


@pytest.mark.parametrize("program", NAMES)
def test_each_option_has_a_row(program):
    listed = " ".join(theirs for theirs, _ in rows(program))
    options = {word.lstrip("-") for word in re.findall(r"`(-*\w[\w-]*)", listed)}
    assert {*NAMES[program].split()} <= options


@pytest.mark.parametrize("program", NAMES)
def test_each_row_is_a_recipe_whose_keys_act_or_says_none(program):
    for theirs, ours in rows(program):
        typed = [span for span in re.findall(r"`([^`]+)`", ours) if "=" in span]
        assert typed or ours.startswith("none"), theirs
        for span in typed:
            _, words = split_arguments(shlex.split(span), ("nproc", "recipe"))
            # This argument is no key.
            words = [word for word in words if word != "check=true"]
            recipe = load(None, *words)
            check_names(recipe)
            check_options(recipe)
            build_transforms(recipe.augment)

            assert notes_on_idle({"data": {"name": "imagefolder"}}, *words) == []

"""What to say of a word that is no key: the key that it misspells, or what most people bring along from elsewhere."""

from __future__ import annotations

from collections.abc import Collection

from trainer.recipe.text import nearest

# Each key of ours, or word, with what torchvision's references, timm, Lightning, Keras and Hugging Face call it.
_THEIRS = {
    "recipe": "config cfg",
    "nproc": "gpus num_gpus num_processes nproc_per_node world_size",
    "mode": "strategy distributed",
    "model.name": "arch model_name",
    "model.weights=DEFAULT": "pretrained",
    "data.name": "dataset",
    "data.root": "data_dir data_path",
    "data.image_size": "imgsz img_size",
    "data.workers": "num_workers j",
    "data.val_fraction": "val_split validation_split",
    "batch_size": "batch bs",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "max_steps": "steps max_iter",
    "optimizer.name": "opt optim",
    "optimizer.lr": "learning_rate base_lr",
    "optimizer.weight_decay": "wd",
    "schedule.name": "scheduler lr_scheduler",
    "schedule.warmup_epochs": "warmup warmup_steps",
    "loss.label_smoothing": "smoothing",
    "precision=bf16": "amp autocast",
    "precision=fp16": "half",
    "precision": "dtype mixed_precision",
    "clip_grad_norm": "grad_clip max_grad_norm gradient_clip_val",
    "devices": "device gpu gpu_ids",
    "stop.patience": "early_stopping",
    "logging.every_steps": "print_freq log_interval",
    "output": "output_dir save_dir",
}
OTHER_NAMES = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def advice_on(name: str, known: Collection[str]) -> str:
    """What to say of a name that is none of the `known` ones: keys, sections and words that may stand there."""
    section, dot, last = name.lower().rpartition(".")
    guess = OTHER_NAMES.get(name.lower())
    if guess is None:
        within = [key for key in known if dot and key.startswith(f"{section}.")]
        same = [key for key in known if key.rpartition(".")[2] == last and last != "name"]
        guess = nearest(name.lower(), within) or (same[0] if len(same) == 1 else None)
        guess = guess or nearest(last if within else name.lower(), known)
    if guess:
        return f"did you mean {guess}?"
    return "python -m trainer recipes keys lists them, and python -m trainer guide answers questions"

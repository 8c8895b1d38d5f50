"""The options that are tried in every mode, and listed in the page about modes."""

from trainer.recipe.optimizer_table import MATRIX_OPTIMIZERS

# Name of an option -> a key and a value that turn the option on.
OPTIONS = {
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "tf32": ("precision", "tf32"),
    "compile": ("compile", True),
    "channels_last": ("channels_last", True),
    "ema": ("ema", 0.9),
    "mixup": ("augment.mixup", 0.2),
    "clip_grad_norm": ("clip_grad_norm", 1.0),
    "accumulate": ("accumulate", 2),
    "accumulate=auto": ("accumulate", "auto"),
    "sync_bn": ("sync_bn", True),
    "label_smoothing": ("loss.label_smoothing", 0.1),
    "freeze": ("model.freeze", 1),
    "probe": ("model.probe", True),
    "layer_decay": ("optimizer.layer_decay", 0.75),
    **{name: ("optimizer.name", name) for name in MATRIX_OPTIMIZERS},
    "graphs": ("graphs", True),
    "recompute": ("recompute", True),
    "shares": ("shares", "auto"),
    "verify": ("verify.every", 2),
}

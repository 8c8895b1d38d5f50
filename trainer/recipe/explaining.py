"""Messages about invalid values and unknown keys.

A message is one line that says what to type. An unknown key is compared with all keys, and with the
names of settings in other libraries.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer.recipe.text import find_nearest, format_value

# Pydantic's types of errors -> the text after "key=value must be".
KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}",
}
# Our keys -> names in torchvision's reference scripts, timm, Lightning, Keras, Ultralytics and
# Hugging Face. Only names with the same meaning are listed: the batch size of one GPU, for example,
# is not our `batch_size`.
_THEIRS = {
    "recipe": "config cfg",
    "nproc": "num_gpus nproc_per_node",
    "mode": "strategy",
    "model.name": "arch model_name",
    "model.weights": "pretrained",
    "data.name": "dataset",
    "data.root": "data_dir data_path",
    "data.image_size": "imgsz img_size",
    "data.workers": "num_workers dataloader_num_workers j",
    "data.val_fraction": "validation_split",
    "data.fraction": "fraction",
    "evaluate.every_steps": "eval_steps val_check_interval",
    "batch_size": "batch train_batch_size global_batch_size",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "max_steps": "max_iter",
    "optimizer.name": "opt optim",
    "optimizer.lr": "learning_rate lr0",
    "optimizer.weight_decay": "wd",
    "schedule.name": "scheduler lr_scheduler sched lr_scheduler_type",
    "schedule.step_epochs": "lr_step_size decay_epochs",
    "schedule.gamma": "lr_gamma decay_rate",
    "schedule.warmup_epochs": "lr_warmup_epochs",
    "schedule.warmup_factor": "lr_warmup_decay",
    "schedule.min_lr": "lr_min",
    "loss.label_smoothing": "smoothing label_smoothing_factor",
    "augment.mixup": "mixup_alpha",
    "augment.cutmix": "cutmix_alpha",
    "augment.auto": "auto_augment",
    "augment.hflip": "fliplr",
    "augment.vflip": "flipud",
    "augment.erase": "random_erase reprob erasing",
    "augment.repeats": "ra_reps ra_sampler",
    "augment.magnitude": "ra_magnitude",
    "data.train_size": "train_crop_size",
    "data.resize": "val_resize_size",
    "precision": "amp autocast mixed_precision",
    "ema": "model_ema",
    "recompute": "gradient_checkpointing grad_checkpointing",
    "clip_grad_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "deterministic": "use_deterministic_algorithms",
    "devices": "device gpu gpu_ids",
    "sync_bn": "sync_batchnorm",
    "stop.patience": "early_stopping patience",
    "save.every_steps": "save_steps",
    "save.every_epochs": "save_period",
    "logging.every_steps": "print_freq log_interval log_every_n_steps logging_steps",
    "logging.progress": "enable_progress_bar",
    "output": "output_dir save_dir",
}
OTHER_NAMES = {name: ours for ours, names in _THEIRS.items() for name in names.split()}
# Settings of other libraries that have no key of the same meaning here. The guide's page `port`
# explains each.
_WITHOUT_KEY = """
    per_device_train_batch_size per_device_eval_batch_size per_gpu_batch_size batch_size_per_gpu bs
    micro_batch_size eval_batch_size val_batch_size validation_batch_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps accumulate_grad_batches
    grad_accum_steps gpus world_size num_processes num_nodes nnodes num_machines distributed dp
    warmup warmup_steps warmup_ratio base_lr lr_base blr lrf lr_decay train_split steps
    steps_per_epoch val_split classes name half dtype drop weight_ema bias_weight_decay
    transformer_embedding_decay lr_warmup_method start_epoch cache_dataset test_only augmix_severity
    dist_url model_ema_steps model_ema_decay val_crop_size backend use_v2 accelerator logger
    callbacks fast_dev_run min_epochs min_steps limit_train_batches limit_val_batches
    overfit_batches check_val_every_n_epoch enable_checkpointing enable_model_summary
    gradient_clip_algorithm benchmark profiler detect_anomaly plugins default_root_dir
    num_sanity_val_steps time project exist_ok verbose single_cls cos_lr profile dropout val plots
    nbs warmup_momentum warmup_bias_lr hsv_h hsv_s hsv_v scale remode recount resplit split_bn
    bn_momentum lr_k_decay checkpoint_hist train_interpolation logging_dir
"""
WITHOUT_KEY = frozenset(_WITHOUT_KEY.split())


def explain_invalid(
    error: ValidationError, defaults: Mapping[str, Any], top: Sequence[str]
) -> tuple[str, str]:
    """Explain pydantic's first error.

    Args:
        error: the validation error.
        defaults: defaults of all dotted keys.
        top: keys and sections of the top level.

    Returns:
        (key, line): the dotted key, and one line that says what to type.
    """
    all_details = error.errors(include_url=False)
    first = all_details[0]
    key = _key(first, defaults)
    # Pydantic reports an error for each type that a key may have. Choose the most helpful one.
    same_key = [
        details for details in all_details if _key(details, defaults).partition("[")[0] == key
    ]
    best = max(same_key, key=_rank, default=first)
    # A key that accepts fixed strings and other types has one error for each of them. The message
    # names all that the key accepts.
    if len(same_key) > 1 and best["type"] == "literal_error":
        kinds = [KINDS[details["type"]] for details in same_key if details["type"] in KINDS]
        *others, last = kinds + _null(key, defaults)
        separator = " or "
        if others:
            separator = ", or "
        choices = ", ".join([*_choices(best), *others])
        return key, f"{key}={format_value(best['input'])} must be {choices}{separator}{last}"
    key = _key(best, defaults)
    return key, _line(best, key, defaults, top)


def _key(details: ErrorDetails, defaults: Mapping[str, Any]) -> str:
    """Return the dotted key of an error.

    If a key accepts several types, pydantic's location also contains the type that it tried. Such
    parts below the key are dropped.
    """
    key = ""
    for part in details["loc"]:
        if isinstance(part, int):
            key += f"[{part}]"
        elif key.partition("[")[0] not in defaults:
            key = f"{key}.{part}".removeprefix(".")
    return key


def _rank(details: ErrorDetails) -> tuple[bool, ...]:
    """Return the precedence of an error among those of its key; the largest is reported.

    Our own messages come first, then errors of an item in a list, then invalid choices.
    """
    return (
        details["type"] == "value_error",
        isinstance(details["loc"][-1], int),
        details["type"] == "literal_error",
    )


def _choices(details: ErrorDetails) -> list[str]:
    """List the values that an error allows."""
    values = re.findall(r"\w+", details["ctx"]["expected"])
    return [value for value in values if value != "or"]


def _null(key: str, defaults: Mapping[str, Any]) -> list[str]:
    """Return ["null"] if the default of the key is null, or else an empty list."""
    if defaults.get(key, key) is None:
        return ["null"]
    return []


def _line(first: ErrorDetails, key: str, defaults: Mapping[str, Any], top: Sequence[str]) -> str:
    """Explain an error in one line that says what to type."""
    kind = first["type"]
    value = first["input"]
    if kind == "extra_forbidden":
        if key in defaults:
            # A file must nest a dotted key in its section.
            section, _, last = key.rpartition(".")
            return f"{key} is not a key; write {section}: {{{last}: {format_value(value)}}}"
        return f"{key} is not a key; {suggest_key(key, [*defaults, *top])}"
    typed = f"{key}={format_value(value)}"
    if kind == "literal_error":
        choices = _choices(first) + _null(key, defaults)
        guess = find_nearest(str(value).lower(), choices)
        message = f"{typed} is not one of {', '.join(choices)}"
        if guess:
            message += f"; did you mean {key}={guess}?"
        return message
    if kind == "model_type":
        inner = next((name for name in defaults if name.startswith(f"{key}.")), "optimizer.lr")
        message = f"{typed} must be a section, as in {inner}=..."
        if value is None:
            message += "; leave an empty one out"
        return message
    message = first["msg"]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        if message.startswith("must"):
            return f"{typed} {message}"
        return f"{key}: {message}"
    if kind in KINDS:
        limits = first.get("ctx", {})
        for name, limit in limits.items():
            if isinstance(limit, float):
                limits[name] = f"{limit:g}"
        message = KINDS[kind].format(**limits)
    return f"{typed} must be {', or '.join([message, *_null(key, defaults)])}"


def suggest_key(name: str, known: Collection[str]) -> str:
    """Suggest what to type instead of an unknown name.

    Args:
        name: the unknown name.
        known: keys, sections and options that are allowed there.
    """
    name = name.lower()
    section, dot, last = name.rpartition(".")
    if last in WITHOUT_KEY:
        return "no key does the same: see python -m trainer guide port"
    guess = OTHER_NAMES.get(name)
    if guess is None:
        in_section = [key for key in known if dot and key.startswith(f"{section}.")]
        guess = find_nearest(name, in_section)
        # Suggest a key of the same name in another section, unless several sections have one.
        same_last = [key for key in known if key.rpartition(".")[2] == last != "name"]
        if guess is None and len(same_last) == 1:
            guess = same_last[0]
        if guess is None:
            guess = find_nearest(last if in_section else name, known)
    if guess:
        return f"did you mean {guess}?"
    return (
        "python -m trainer recipes keys lists them, and python -m trainer guide answers questions"
    )

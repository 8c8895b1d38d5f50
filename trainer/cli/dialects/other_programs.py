"""Keys that exist elsewhere only, with a value that decides what they are here, or with nothing to type for them."""

from __future__ import annotations

from collections.abc import Callable

from trainer.cli.dialects.meaning import NO, NOTHING, WEIGHTS, YES, Around, Meaning, put
from trainer.cli.dialects.values import devices, value_of, weights
from trainer.recipe import MODES
from trainer.recipe.other_names import OTHER_KEYS

Told = Callable[[str, Around], Meaning | None]


def _precision(name: str) -> Told:
    def chosen(value: str, around: Around) -> Meaning:
        if value.lower() in ("o0", *NOTHING):
            return put("precision", "fp32")
        if value.lower() in YES:
            return put("precision", name)
        return value_of("precision", value, around) or put("precision", name)

    return chosen


def _pretrained(value: str, around: Around) -> Meaning:
    if "checkpoint" in around.own and ("/" in value or value.endswith(WEIGHTS)):
        return put("checkpoint", value)
    return weights(value, around) or put("model.weights", value)


def _cpu(yes: bool) -> Told:
    """A switch for the CPU (`cpu`, `no_cuda`), or for GPUs."""
    return lambda value, _: put("devices", "[cpu]" if (value.lower() not in NO) is yes else "auto")


def _cuda(value: str, around: Around) -> Meaning:
    named = devices("cuda", value, around) if value.lower() not in (*YES, *NO) else None
    return named or put("devices", "[cpu]" if value.lower() in NO else "auto")


def _checkpoint(_: str, around: Around) -> Meaning | None:
    if "checkpoint" in around.own:
        return None
    return Meaning((), "checkpoint= is of evaluate and predict; to continue a run: output=RUN resume=auto")


def _mode(name: str) -> Told:
    """A switch for a mode, as --ddp."""
    return lambda value, _: put("mode", name) if value.lower() in YES else None


def _nodes(value: str, _: Around) -> Meaning:
    return Meaning((), f"several nodes: on each of them NNODES={value} NODE_RANK=0 MASTER_ADDR=HOST before the command")


def _named_run(value: str, around: Around) -> Meaning:
    """A run's name, in the folder that was typed with it."""
    keys = (key for key in around.values if key == "output" or OTHER_KEYS.get(key) == "output")
    folders = (around.values[key] for key in keys if key not in NAMES)
    folder = next((folder for folder in folders if folder), "")
    if folder:
        return put("output", f"{folder.rstrip('/')}/{value}")
    return put("output", value if "/" in value else f"runs/{value}")


def _folder_of_runs(value: str, around: Around) -> Meaning | None:
    """A folder that a run's name was typed with; None without one."""
    name = next((around.values[key] for key in NAMES if around.values.get(key)), "")
    return put("output", f"{value.rstrip('/')}/{name}") if name and value else None


def _recompute(value: str, around: Around) -> Meaning | None:
    if around.staged or value.lower() in NOTHING:
        return None
    return Meaning((), "only mode=split and mode=pipeline have it, as pipeline.recompute=true; guide memory tells more")


def _bce_loss(value: str, _: Around) -> Meaning:
    return put("task.name", "classification" if value.lower() in NO else "multilabel", "which has this loss")


def _saved(value: str, around: Around) -> Meaning | None:
    if around.command != "predict":
        return None
    return Meaning((), "predictions are always written, into the folder output=: leave it out")


def _logger(value: str, _: Around) -> Meaning:
    if value.lower() in ("wandb", "mlflow"):
        return put(f"logging.{value.lower()}", "true")
    return put("logging.tensorboard", "false" if value.lower() in NOTHING else "true")


def _beta(first: bool) -> Told:
    """One of Adam's two, which are one key here, with the other where that was typed too."""

    def both(value: str, around: Around) -> Meaning:
        other = next((around.values[name] for name in BETAS[first] if around.values.get(name)), None)
        return put("optimizer.betas", f"[{value},{other or 0.999}]" if first else f"[{other or 0.9},{value}]")

    return both


def _few_steps(value: str, _: Around) -> Meaning | None:
    """A try of some steps."""
    steps = "1" if value.lower() in YES else value
    return put("max_steps", steps) if steps.isdigit() and steps != "0" else None


def _no_progress(value: str, _: Around) -> Meaning:
    return put("logging.progress", "true" if value.lower() in NO else "false")


def _sharded(value: str, _: Around) -> Meaning:
    if value.lower() in NOTHING:
        return Meaning((), "weights are not sharded here: leave it out")
    return put("mode", "pipeline", "weights are not sharded here; a pipeline shares a model among devices too")


def _said(what: str) -> Told:
    return lambda _, __: Meaning((), what)


def _dropped(why: str) -> Told:
    return lambda _, __: Meaning((), f"{why}: leave it out")


NAMES = ("name", "exp", "experiment", "run_id", "run_name")  # of a run, elsewhere
BETAS = (("adam_beta1", "beta_1", "beta1"), ("adam_beta2", "beta_2", "beta2"))  # of Adam, elsewhere: both of its two
ELSEWHERE: dict[str, Told] = {
    **dict.fromkeys(("amp", "use_amp", "half", "mixed", "autocast"), _precision("bf16")),
    **{name: _precision(name) for name in ("fp16", "bf16", "tf32", "fp32")},
    "allow_tf32": _precision("tf32"),
    **dict.fromkeys(("ckpt", "checkpoint_path"), _checkpoint),
    "pretrained": _pretrained,
    "weights": _pretrained,
    **dict.fromkeys(("cpu", "no_cuda", "use_cpu"), _cpu(True)),
    **dict.fromkeys(("cuda", "use_cuda", "use_gpu"), _cuda),
    **{name: _mode(name) for name in MODES},
    **dict.fromkeys(("distributed", "multiprocessing_distributed", "multi_gpu"), _mode("ddp")),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes", "num_machines"), _nodes),
    **{name: _folder_of_runs for name, key in OTHER_KEYS.items() if key == "output"},
    "output": _folder_of_runs,
    **dict.fromkeys(NAMES, _named_run),
    **{name: _recompute for name, key in OTHER_KEYS.items() if key == "pipeline.recompute"},
    **dict.fromkeys(("save", "save_txt", "save_conf", "save_crop"), _saved),
    **dict.fromkeys(("logger", "logging", "report_to", "log_with"), _logger),
    **dict.fromkeys(BETAS[0], _beta(first=True)),
    **dict.fromkeys(BETAS[1], _beta(first=False)),
    **dict.fromkeys(("fast_dev_run", "overfit_batches", "limit_train_batches"), _few_steps),
    **dict.fromkeys(("disable_tqdm", "no_progress_bar"), _no_progress),
    **dict.fromkeys(("fsdp", "use_fsdp", "deepspeed", "use_deepspeed", "zero_stage"), _sharded),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_steps", "warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
        _said("the warm-up is counted in epochs, and parts of them: schedule.warmup_epochs=0.5"),
    ),
    **dict.fromkeys(
        ("color_jitter", "hsv_h", "hsv_s", "hsv_v", "degrees", "rotation", "translate", "shear"),
        _said("augment.auto=trivial turns, shifts, shears and recolours images"),
    ),
    "lrf": _said("schedule.min_lr= is the last learning rate itself, not a share of the first"),
    "auto_find_batch_size": _said("the command plan says beforehand what fits into memory"),
    "max_time": _said("max_steps= ends a run; one that is stopped goes on with resume=auto"),
    "steps_per_epoch": _said("an epoch is each training image once; max_steps= ends a run earlier"),
    **dict.fromkeys(
        (
            "local_rank",
            "rank",
            "node_rank",
            "machine_rank",
            "master_addr",
            "master_port",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "rdzv_endpoint",
        ),
        _dropped("torchrun tells it itself"),
    ),
    **dict.fromkeys(("verbose", "v", "quiet", "q", "debug"), _dropped("there is no such switch")),
    **dict.fromkeys(
        ("backend", "dist_backend", "dist_url", "ddp_backend"), _dropped("NCCL joins GPUs and gloo CPUs by itself")
    ),
    **dict.fromkeys(
        (
            "val",
            "validate",
            "do_eval",
            "eval",
            "val.every",
            "eval.every",
            "val_every",
            "eval_every",
            "val.interval",
            "eval.interval",
            "val_interval",
            "eval_interval",
            "eval_freq",
            "val_freq",
            "check_val_every_n_epoch",
            "val_check_interval",
            "eval_strategy",
            "evaluation_strategy",
            "eval_steps",
            "validation_freq",
        ),
        _dropped("every epoch ends with an evaluation"),
    ),
    **dict.fromkeys(
        ("limit_val_batches", "validation_steps", "num_sanity_val_steps"),
        _dropped("each held-out image is evaluated, once an epoch"),
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size", "val_batch_size", "test_batch_size"),
        _dropped("no figure depends on how many images are evaluated at a time"),
    ),
    **dict.fromkeys(
        (
            "monitor",
            "eval_metric",
            "metric_for_best_model",
            "greater_is_better",
            "load_best_model_at_end",
            "restore_best_weights",
            "save_best_only",
            "save_last",
            "save_weights_only",
            "checkpoint_metric",
        ),
        _dropped("the run's folder keeps the last weights and the best, by the task's own metric"),
    ),
    "metrics": _dropped("the metrics are those of the task"),
    **dict.fromkeys(
        ("gradient_clip_algorithm", "clip_mode"), _dropped("gradients are clipped by their norm, clip_grad_norm=")
    ),
    **dict.fromkeys(("start_epoch", "initial_epoch"), _dropped("resume=auto knows where the run was")),
    **dict.fromkeys(
        ("vflip", "flipud", "vertical_flip", "mosaic", "copy_paste", "perspective"),
        _dropped("images are not varied in this way; recipes keys augment lists the ways there are"),
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
        _dropped("ddp needs no settings"),
    ),
    **dict.fromkeys(("dropout", "drop", "drop_rate", "drop_path"), _dropped("dropout is the model's own")),
    **dict.fromkeys(
        ("exist_ok", "overwrite", "force", "overwrite_output_dir"),
        _dropped("choose another output=, or continue by resume=auto"),
    ),
    **dict.fromkeys(("cudnn_benchmark", "benchmark", "cudnn"), _dropped("kernels are chosen by trying them")),
    "bce_loss": _bce_loss,
    **dict.fromkeys(("rect", "square"), _dropped("images have one side, data.image_size=")),
    **dict.fromkeys(
        ("rescale", "normalize", "normalise"), _dropped("pixels are brought to data.mean= and data.std= by themselves")
    ),
    **dict.fromkeys(("plots", "plot"), _dropped("TensorBoard shows the curves, see guide watch")),
    **dict.fromkeys(("topk", "top_k"), _dropped("top-1 and top-5 are always told")),
    "tta": _dropped("each image is looked at once"),
    **dict.fromkeys(("pin_memory", "dataloader_pin_memory"), _dropped("memory is pinned where a GPU trains")),
    "persistent_workers": _dropped("workers live as long as the run"),
    "standalone": _dropped("ranks are started by nproc="),
    "shuffle": _dropped("training images are shuffled in every epoch"),
}

"""Keys that exist elsewhere only, with a value that decides what they are here, or with nothing to type for them."""

from __future__ import annotations

from collections.abc import Callable

from trainer.recipe import MODES
from trainer.words.meaning import NO, NOTHING, WEIGHTS, YES, Around, Meaning, put
from trainer.words.values import devices, value_of, weights

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


def _named_run(value: str, _: Around) -> Meaning:
    return put("output", value if "/" in value else f"runs/{value}")


def _logger(value: str, _: Around) -> Meaning:
    if value.lower() in ("wandb", "mlflow"):
        return put(f"logging.{value.lower()}", "true")
    return put("logging.tensorboard", "false" if value.lower() in NOTHING else "true")


def _dropped(why: str) -> Told:
    return lambda _, __: Meaning((), f"{why}: leave it out")


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
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes"), _nodes),
    **dict.fromkeys(("name", "exp", "experiment", "run_id"), _named_run),
    **dict.fromkeys(("logger", "logging", "report_to"), _logger),
    **dict.fromkeys(
        ("local_rank", "rank", "node_rank", "master_addr", "master_port"), _dropped("torchrun tells it itself")
    ),
    **dict.fromkeys(("verbose", "v", "quiet", "q", "debug"), _dropped("there is no such switch")),
    **dict.fromkeys(("backend", "dist_backend", "dist_url"), _dropped("NCCL joins GPUs and gloo CPUs by itself")),
    **dict.fromkeys(("val", "validate", "do_eval", "eval"), _dropped("every epoch ends with an evaluation")),
    **dict.fromkeys(("dropout", "drop", "drop_rate", "drop_path"), _dropped("dropout is the model's own")),
    **dict.fromkeys(("exist_ok", "overwrite", "force"), _dropped("choose another output=, or continue by resume=auto")),
    **dict.fromkeys(("cudnn_benchmark", "benchmark", "cudnn"), _dropped("kernels are chosen by trying them")),
    "tta": _dropped("each image is looked at once"),
    "pin_memory": _dropped("memory is pinned where a GPU trains"),
    "persistent_workers": _dropped("workers live as long as the run"),
    "standalone": _dropped("ranks are started by nproc="),
    "shuffle": _dropped("training images are shuffled in every epoch"),
}

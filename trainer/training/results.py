"""The keys of `result.json`, which scripts rely on: keys are added, never renamed or removed."""

from typing import Annotated, Any, TypedDict


class Metrics(TypedDict, total=False):
    """The metrics in `result.json`. A user's own metrics get the same prefixes, `val_` and `best_`.

    A value is null until an epoch has been evaluated.
    """

    val_loss: float | None
    val_top1: float | None
    val_top5: float | None
    val_balanced_accuracy: float | None
    val_precision: float | None
    val_recall: float | None
    val_f1: float | None
    val_precision_macro: float | None
    val_recall_macro: float | None
    val_f1_macro: float | None
    val_precision_weighted: float | None
    val_recall_weighted: float | None
    val_f1_weighted: float | None
    val_mcc: float | None
    val_ece: float | None
    val_auroc: float | None
    val_average_precision: float | None
    val_mae: float | None
    val_rmse: float | None
    val_r2: float | None
    best_top1: float | None
    best_f1: float | None
    best_loss: float | None


class Result(Metrics):
    """The content of `result.json`.

    With mode=dp there is also the key `data_parallel`, and with mode=fsdp on several ranks the key
    `fsdp`.
    """

    recipe: Annotated[str, "name of the recipe"]
    mode: Annotated[str, "as in the recipe"]
    world_size: Annotated[int, "number of processes"]
    devices: Annotated[list[str], "their names"]
    batch_size: Annotated[int, "images per step, over all devices"]
    accumulate: Annotated[int, "number of pieces in which a step is computed"]
    shares: Annotated[
        list[int] | None, "images of a step that each rank computes, if these are unequal"
    ]
    precision: Annotated[str, "the precision used on these devices"]
    epochs: Annotated[int, "epochs completed"]
    steps: Annotated[int, "steps completed"]
    status: Annotated[str, "`running`, `completed`, `preempted` or `failed`"]
    error: Annotated[str | None, "one line, if it failed"]
    ended_by: Annotated[
        str | None,
        "`epochs`, `max_steps`, `max_time`, `stop.patience`, `callback` or `speed`, if it "
        "completed",
    ]
    exit_code: Annotated[int | None, "null while it runs"]
    task: Annotated[str, "name of the task"]
    data: Annotated[
        dict[str, Any],
        "`name`, `synthetic`, `train_samples`, `val_samples`, times that an unreadable image was "
        "left out (`skipped`), that one was not in the cache (`uncached`)",
    ]
    train_loss: Annotated[float | None, "mean loss of the last epoch"]
    best_epoch: Annotated[
        int | None, "counted from 1, as on the screen; its weights are `best.safetensors`"
    ]
    knn_top1: Annotated[
        float | None, "with `model.probe`: top-1 accuracy of the 20 nearest neighbors"
    ]
    throughput: Annotated[
        dict[str, Any] | None, "images/s: `samples_per_sec`, its `std`, `per_device`, `threads`"
    ]
    step_time_s: Annotated[
        dict[str, float | None] | None, "seconds of a step: `mean`, `std`, `p95`"
    ]
    data_wait_fraction: Annotated[float | None, "share of a step's time spent waiting for images"]
    launch_bound_fraction: Annotated[
        float | None,
        "largest share of a step in which the GPU may wait for launches; null without a GPU",
    ]
    short: Annotated[
        bool,
        "true if the run was too short for logging.warmup_steps: speeds leave out its first step",
    ]
    graphs: Annotated[
        str | None,
        "`replayed` or `launched`: how steps were computed at the end; null without a GPU",
    ]
    recompute: Annotated[
        str | None, "what backward passes compute again, as in `8 of 8 blocks`; null: nothing"
    ]
    peak_memory_bytes: Annotated[dict[str, int], "of each device"]
    mfu: Annotated[float | None, "share of the devices' peak FLOP/s; null if that is not known"]
    pipeline: Annotated[
        dict[str, Any] | None, "stages, cuts, bubble and more; null if the model is in one piece"
    ]
    losses: Annotated[list[float | None], "mean training loss of each epoch"]
    validation: Annotated[
        list[dict[str, float | None]],
        "of each evaluation: `epoch`, `step`, `train_loss`, and every metric by its name; null if "
        "it was not a number",
    ]
    nonfinite_steps: Annotated[
        int, "steps that an earlier version left out, since a loss or gradient was not finite"
    ]
    logged: Annotated[dict[str, float | None], "last values of what your callbacks logged, by name"]
    seconds: Annotated[float, "of the whole run, before and after interruptions"]
    seconds_in: Annotated[dict[str, float], "seconds of each part since the last interruption"]
    save: Annotated[
        dict[str, float] | None,
        "since the last interruption: saves (`count`), mean seconds that one paused training "
        "(`blocked_s`) and took",
    ]
    goodput: Annotated[
        dict[str, Any] | None,
        "over all attempts: `fraction` of the time `wall_s` in useful steps, `seconds` of each "
        "part, `attempts`, `ends`, `notes`: see [resume](resume.md#goodput-where-the-time-went)",
    ]
    verdict: Annotated[dict[str, Any] | None, "what limits the speed; null if nothing was measured"]
    warnings: Annotated[
        dict[str, str], "what went wrong, in sentences; empty if nothing was noticed"
    ]
    facts: Annotated[dict[str, str], "what ran, by heading, as `runs show` prints it"]
    versions: Annotated[dict[str, str | None], "of trainer, python, torch, torchvision and cuda"]
    output: Annotated[str | None, "the run folder"]

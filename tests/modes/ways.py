"""Every way to train: the modes and the pipelines' schedules, as words of the command line.

One table for all tests that go through them. `test_parity.py` holds it against the recipe's own lists.
"""

from __future__ import annotations

from trainer.modes.pipeline.torch_schedules import SCHEDULES

TWO_DEVICES = "devices=[cpu,cpu]"
PIPELINE = ["mode=pipeline", "pipeline.microbatches=4"]
ONE_PROCESS = {
    "dp": ["mode=dp", TWO_DEVICES],
    "split": ["mode=split", TWO_DEVICES],
    "streams": [*PIPELINE, TWO_DEVICES],
}
# What computes the same as mode=single, up to the order in which floating-point numbers are added.
EXACT = {
    **ONE_PROCESS,
    "ddp": ["mode=ddp", "nproc=2"],
    "fsdp": ["mode=fsdp", "nproc=2"],
    "fsdp 4": ["mode=fsdp", "nproc=4", "fsdp.reshard=false"],
    "fsdp 2x2": ["mode=fsdp", "nproc=4", "fsdp.shards=2"],
    **{name: [*PIPELINE, "nproc=2", f"pipeline.schedule={name}"] for name in SCHEDULES},
    "1f1b 2x2": [*PIPELINE, "nproc=4", "pipeline.stages=2"],
}
# What trains workers apart from each other: the same only with one worker.
WORKERS = {mode: [f"mode={mode}", "nproc=2"] for mode in ("local_sgd", "hogwild")}

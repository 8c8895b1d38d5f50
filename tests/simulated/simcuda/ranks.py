"""Two ranks on simulated cards, as processes that are forked from one with all imports; gloo
replaces NCCL.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests import warm
from tests.command_line import PROJECT, free_port

SHARDED = (
    "model.name=cnn optimizer.name=adamw accumulate=2 clip_grad_norm=1 ema=0.9 save.every_steps=1"
)
CASES = {
    "ddp": "mode=ddp accumulate=2 clip_grad_norm=1 ema=0.9 save.every_steps=1",
    "ddp with graphs": "mode=ddp accumulate=2 graphs=true data.samples=192 clip_grad_norm=1",
    "ddp with graphs and sync_bn": (
        "mode=ddp model.name=cnn sync_bn=true graphs=true data.samples=192 ddp.compress=bf16"
    ),
    "ddp with sync_bn": "mode=ddp model.name=cnn sync_bn=true ema=0.9",
    "pipeline": (
        "mode=pipeline model.name=cnn pipeline.microbatches=4 clip_grad_norm=1 "
        "ema=0.9 precision=bf16"
    ),
    "pipeline of more "
    "stages": "mode=pipeline pipeline.schedule=interleaved1f1b pipeline.timeline=true accumulate=2",
    "fsdp": f"mode=fsdp {SHARDED}",
    "fsdp with graphs": (
        "mode=fsdp model.name=cnn optimizer.name=adamw accumulate=2 clip_grad_norm=1 ema=0.9 "
        "graphs=true data.samples=192"
    ),
    "fsdp on the host": f"mode=fsdp fsdp.offload=true {SHARDED}",
    "local_sgd on one "
    "card": "mode=local_sgd local_sgd.every=1 model.name=cnn ema=0.9 devices=[cuda:0]",
}
BACKWARD = "modes/base.py Strategy.backward"
ALLOWED = {
    # Averaging weights is no training step, and on one card it goes over the host.
    "local_sgd on one card": {
        ("D2H", "modes/local_sgd.py LocalSGD._average"),
        ("H2D", "modes/flattening.py unflatten_into"),
    },
    # The host waits for the gradients that it works on: in torch, and for what else is on its way.
    "fsdp on the host": {
        ("D2H", BACKWARD),
        ("synchronize", BACKWARD),
        ("synchronize", "telemetry/clocks.py synchronise"),
    },
}
# Stages of torch exchange messages with their neighbors in their first step.
ONCE = {
    (kind, "modes/pipeline/ranks.py ProcessPipeline.forward_backward") for kind in ("H2D", "item")
}


@functools.cache
def both() -> dict[str, Any]:
    """Return the results of all cases: losses on simulated cards and on the CPU, errors, waits in
    steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TRAINER_", "TORCHELASTIC_"))
        }
        command = [sys.executable, "-m", "tests.simulated.simcuda.ranks", folder]
        completed = warm.run(
            command,
            env={**plain, "PYTHONPATH": str(PROJECT)},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=PROJECT,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        actual = {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
    cases: dict[str, Any] = {}
    for name in CASES:
        ranks = [actual[f"{name}-cuda-{rank}"] for rank in range(2)]
        cases[name] = {
            "cuda": ranks[0]["losses"],
            "cpu": actual[f"{name}-cpu-0"]["losses"],
            "errors": [rank["errors"] for rank in ranks],
            "held": [rank["held"] for rank in ranks],
            "graphs": ranks[0]["graphs"],
            "waits": [place for rank in ranks for place in rank["waits"]],
        }
    return cases


def main(folder: Path) -> int:
    import torch

    torch.set_num_threads(1)
    failed = 0
    for name, words in CASES.items():
        for kind in ("cuda", "cpu"):
            port = free_port()
            children = [_fork(folder, name, words, kind, rank, port) for rank in range(2)]
            failed |= max(os.waitpid(child, 0)[1] for child in children)
    return int(failed != 0)


def _fork(
    folder: Path,
    name: str,
    words: str,
    kind: str,
    rank: int,
    port: str,
) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _rank(folder, name, words, kind, rank, port)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _rank(
    folder: Path,
    name: str,
    words: str,
    kind: str,
    rank: int,
    port: str,
) -> None:
    from tests.simulated.simcuda import runs
    from trainer.modes import gradient_buckets

    gradient_buckets.FIRST_BUCKET = 64
    gradient_buckets.BUCKET = 1024
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    output = folder / f"{name}-{kind}"
    if kind == "cuda":
        trained = runs.train_on_cuda(words, output, 2, own=rank == 0)
    else:
        words = words.replace("graphs=true", "graphs=false")
        trained = runs.train_on_cpu(words, output, own=rank == 0)
    stages = 2 if "more stages" in name else 1
    actual = {
        "losses": trained.losses,
        "errors": trained.errors,
        "held": trained.held,
        "graphs": trained.result.get("graphs"),
        "waits": sorted(
            place
            for place, count in trained.waits_in_steps().items()
            if count > stages * (place in ONCE)
        ),
    }
    (folder / f"{name}-{kind}-{rank}.json").write_text(json.dumps(actual))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""How well `python -m trainer plan measured=here` predicts a step: against real runs, through the
command line.

    python tests/benchmarks/plan_accuracy.py                         # pipelines of two ranks of one
    thread python tests/benchmarks/plan_accuracy.py --mode ddp --rounds 5   # other modes

In each round a plan is made and then run, so that both meet the machine in the same state; the run
takes the plan's cuts and micro-batches. A line a round, and for each model the median of predicted
/ measured, which should lie between 0.85 and 1.15.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {
    "resnet18": ["model.name=resnet18", "data.image_size=64", "batch_size=96"],
    "resnet50": ["model.name=resnet50", "data.image_size=64", "batch_size=96"],
    "vit_tiny": ["model.name=vit_tiny", "data.image_size=32", "batch_size=96"],
    "vit_b_16": [
        "model.name=vit_b_16",
        "data.image_size=224",
        "batch_size=8",
        "pipeline.microbatches=4",
    ],
}
RUN = [
    "epochs=1",
    "logging.warmup_steps=3",
    "logging.every_steps=5",
    "logging.tensorboard=false",
    "logging.progress=false",
    "logging.verdict=false",
    "save.every_epochs=null",
    "data.val_samples=32",
]


def trainer(*words: str) -> str:
    """Return the output of `python -m trainer words...`."""
    return subprocess.check_output([sys.executable, "-m", "trainer", *words], text=True)


def chosen(plan: dict[str, Any]) -> list[str]:
    """Return the arguments that make a run use the plan's cuts and micro-batches."""
    pipe = plan["pipeline"]
    if pipe is None or plan["mode"] == "split":
        return []
    cuts = ",".join(f"'{cut}'" for cut in pipe["cuts"])
    words = [f"pipeline.cuts=[{cuts}]", f"pipeline.schedule={pipe['schedule']}"]
    return [*words, f"pipeline.microbatches={pipe['microbatches']}"]


def once(base: list[str], steps: int) -> tuple[float, float, str]:
    """Predicted and measured seconds of a step, and how the model was cut."""
    plan: dict[str, Any] = json.loads(trainer("plan", *base, "measured=here", "--json"))
    predicted = plan["prediction"]["step_seconds"]
    fixed = chosen(plan)
    keys = {word.partition("=")[0] for word in fixed}
    again = [word for word in base if word.partition("=")[0] not in keys]
    with tempfile.TemporaryDirectory() as folder:
        trainer(*again, *fixed, *RUN, f"max_steps={steps}", f"output={folder}/run")
        result: dict[str, Any] = json.loads(Path(folder, "run", "result.json").read_text())
    pipe = result["pipeline"]
    how = (
        f"{pipe['schedule']}, {pipe['microbatches']} micro-batches, cut after "
        f"{', '.join(pipe['cuts'])}"
        if pipe
        else ""
    )
    return predicted, result["step_time_s"]["mean"], how


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", default="pipeline")
    parser.add_argument("--nproc", default=2, type=int)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--steps", default=14, type=int)
    parser.add_argument("--only", choices=MODELS, action="append")
    options = parser.parse_args()
    for name in options.only or MODELS:
        words = [
            f"mode={options.mode}",
            f"threads={options.threads}",
            "data.name=synthetic",
            *MODELS[name],
        ]
        words += [f"nproc={options.nproc}"] if options.nproc > 1 else []
        words += ["data.samples=4096"]
        ratios = []
        for _ in range(options.rounds):
            predicted, measured, how = once(words, options.steps)
            ratios.append(predicted / measured)
            print(
                f"{name:10} predicted {predicted:7.3f} s  measured {measured:7.3f} s  "
                f"{ratios[-1]:.2f}  {how}",
                flush=True,
            )
        print(
            f"{name:10} predicted / measured: {statistics.median(ratios):.2f} ({min(ratios):.2f} "
            f"to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()

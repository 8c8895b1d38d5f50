"""How often `compare` is right: identical variants, and one that takes 10 % longer, on this machine.

    python tests/benchmarks/compare_verdicts.py

Each comparison runs three variants of one recipe, interleaved: A, A again, and A slowed by 10 %. Asked is what it says
of the first two (it should be "no difference shown") and of the first and the third ("slower"). The slowed model looks
at how long each of its steps takes and idles for a tenth of that, so that it is 10 % slower whatever the machine does
meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests import warm
from trainer.commands.compare import compare
from trainer.commands.trials.significance import Difference, mean_and_std, ratios

PLUGIN = """
import time
from trainer import register_model
from trainer.models.zoo import build
from trainer.recipe import ModelRecipe

@register_model("slowed")
def slowed(num_classes, channels, image_size):
    model = build(ModelRecipe(name="cnn"), num_classes, channels, image_size)
    last = [None, 0.0]  # when the last forward pass began, and how long it idled

    def idle(module, inputs):
        now = time.perf_counter()
        if module.training and last[0] is not None:
            last[1] = {share} * (now - last[0] - last[1])
        until = now + last[1]
        last[0] = now
        while module.training and time.perf_counter() < until:
            pass

    model.register_forward_pre_hook(idle)
    return model
"""
MODES = ("single", "single", "single model.name=slowed")


def comparison(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `compare` found."""
    words = ["model.name=cnn", "threads=1", f"batch_size={options.batch}", "logging.tensorboard=false"]
    with open(folder.with_suffix(".txt"), "w") as quiet, redirect_stdout(quiet):
        report = compare(
            "digits",
            MODES,
            words=words,
            repeats=options.repeats,
            steps=options.steps,
            plugin="slowed_model",
            output=str(folder),
        )
    failed = [row["error"] for row in report["entries"] if row["error"]]
    if failed:
        raise RuntimeError(failed[0])
    return report


def _said(found: Difference) -> str:
    return f"{found.ratio:.3f} ({found.low:.3f}-{found.high:.3f}) {found.verdict or 'no difference shown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--repeats", type=int, help="2 or more; default: as many as compare takes")
    parser.add_argument("--steps", type=int, help="of a run; default: as many as compare takes, about 4 s of them")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--slower", type=float, default=0.1)
    options = parser.parse_args()
    if options.repeats == 1:
        parser.error("--repeats: one repeat says nothing of the spread")
    warm.everything()
    with tempfile.TemporaryDirectory() as home:
        Path(home, "slowed_model.py").write_text(PLUGIN.format(share=options.slower))
        os.environ["PYTHONPATH"] = os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, home)
        same, slow, repeats, noise, begun = 0, 0, 0, [], time.perf_counter()
        for number in range(1, options.comparisons + 1):
            report = comparison(options, Path(home, str(number)))
            one, again, _ = (row["samples_per_sec"]["runs"] for row in report["entries"])
            alike, unlike, _ = (Difference(**pair) for pair in report["pairs"])  # first is A in both
            same += alike.verdict is None
            slow += unlike.verdict == "faster"
            noise.append(mean_and_std(ratios(again, one))[1])
            repeats += report["repeats"]
            print(
                f"{number:3}: {report['repeats']} repeats; A / A {_said(alike)}; A / slowed {_said(unlike)}", flush=True
            )
    print(f"identical variants, no difference shown: {same} of {options.comparisons}")
    print(f"slowed by {options.slower:.0%}, named slower: {slow} of {options.comparisons}")
    print(
        f"a pair's ratio scatters by {mean_and_std(noise)[0]:.1%} (mean standard deviation within a comparison); "
        f"{repeats / options.comparisons:.1f} repeats; {(time.perf_counter() - begun) / 60:.0f} min"
    )


if __name__ == "__main__":
    main()

"""Images per second of our command against the loop in every tutorial, synthetic images, one device.

    python tests/benchmarks/images_per_second.py --model resnet50 --size 224 --batch 256 --precision bf16 --compile

Ours runs with its defaults (channels_last, fused optimizer, malloc thresholds) plus the options given. `tutorial` is
NCHW fp32 without any of them; `tuned` is the same loop with the options given, channels_last and a fused optimizer.
They alternate, each in a fresh process; printed are medians and, round by round, ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARMUP = 5


def loop(options: argparse.Namespace, tuned: bool) -> float:
    """Images a second of a raw loop on images that lie on the device."""
    import torch
    import torchvision
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if tuned else torch.contiguous_format
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    model = torchvision.models.get_model(options.model, num_classes=1000).to(device, memory_format=layout)
    if tuned and options.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=tuned or None)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device).to(memory_format=layout)
    labels = torch.randint(0, 1000, (options.batch,), device=device)
    criterion = nn.CrossEntropyLoss()
    begun = 0.0
    for step in range(options.steps):
        if step == WARMUP:
            _ = torch.cuda.synchronize() if device.type == "cuda" else None
            begun = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, kind, enabled=tuned and kind is not None):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    _ = torch.cuda.synchronize() if device.type == "cuda" else None
    return (options.steps - WARMUP) * options.batch / (time.perf_counter() - begun)


def ours(options: argparse.Namespace) -> float:
    """Images a second as `result.json` has them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        words = ["recipe=resnet50", "mode=single", f"model.name={options.model}", f"data.image_size={options.size}"]
        words += [f"batch_size={options.batch}", f"precision={options.precision}", f"max_steps={options.steps}"]
        words += [f"compile={str(options.compile).lower()}", f"logging.warmup_steps={WARMUP}", "augment.hflip=0"]
        words += ["augment.crop=none", "logging.progress=false", f"output={output}"]
        words += [f"threads={options.threads}"] if options.threads else []
        subprocess.run([sys.executable, "-m", "trainer", *words], check=True, stdout=subprocess.DEVNULL)
        return json.loads((output / "result.json").read_text())["throughput"]["samples_per_sec"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--child", choices=["tutorial", "tuned"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(loop(options, tuned=options.child == "tuned"))
        return

    def child(kind: str) -> float:
        done = subprocess.run(
            [sys.executable, *sys.argv, f"--child={kind}"], check=True, capture_output=True, text=True
        )
        return float(done.stdout.split()[-1])

    found: dict[str, list[float]] = {"tutorial": [], "tuned": [], "ours": []}
    for _ in range(options.rounds):
        found["tutorial"].append(child("tutorial"))
        found["tuned"].append(child("tuned"))
        found["ours"].append(ours(options))
    print(f"{options.model}, {options.size} px, batch {options.batch}, {options.precision}, {options.rounds} rounds")
    print(f"{'':10} {'images/s':>9} {'ours / it: median':>18} {'min':>6} {'max':>6}")
    for name, rates in found.items():
        ratios = [a / b for a, b in zip(found["ours"], rates, strict=True)]
        print(
            f"{name:10} {statistics.median(rates):9.1f} {statistics.median(ratios):18.3f} "
            f"{min(ratios):6.3f} {max(ratios):6.3f}"
        )


if __name__ == "__main__":
    main()

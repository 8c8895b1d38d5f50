"""Runs of the odd models, in this process or as ranks that are forked from it.

zoo_runs.py FOLDER WAY... trains each model in these ways and writes FOLDER/WAY.json: by model, what
became of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.command_line import BARE, losses
from tests.modes.odd_models import BY_EPOCH, DRAWS, HALF, ODD, WHOLE_BATCH, Normed, SinglePart
from tests.modes.ways import ONE_PROCESS, PIPELINE
from trainer import train
from trainer.errors import RecipeError
from trainer.modes import fsdp_units
from trainer.optim.optimization import Updater
from trainer.saving import checkpoint

CLOSE, CLOSE_IN_HALF = 1e-4, 0.05  # relative distances
PATIENCE = 30.0  # seconds for ranks, which need one
WORDS = [
    "digits",
    "batch_size=32",
    "data.name=synthetic",
    "data.samples=192",
    "data.val_samples=32",
    "data.image_size=8",
    "data.channels=1",
    "augment.crop=none",
    "schedule.warmup_epochs=0",
    "threads=1",
]
WORDS += ["logging.every_steps=1", "logging.progress=false", *BARE]
MOVING = ["optimizer.lr=0.05"]
# A loss is moved by draws alone.
STILL = [
    "optimizer.lr=1e-9",
    "optimizer.momentum=0",
    "optimizer.nesterov=false",
]
TWO = "nproc=2"
# Modes in which one pass computes the whole batch and draws the random numbers of mode=single.
UNDIVIDED = (
    "dp",
    "split",
    "recompute",
)
LATER = "fsdp, compared later"  # Ranks on GPUs do not check before each exchange.
WAYS = {
    **ONE_PROCESS,
    "ddp": ["mode=ddp", TWO],
    "fsdp": ["mode=fsdp", TWO],
    "sync_bn": ["mode=ddp", "sync_bn=true", TWO],
    LATER: ["mode=fsdp", TWO],
    "gpipe": [*PIPELINE, TWO, "pipeline.schedule=gpipe"],
    "1f1b": [*PIPELINE, TWO, "pipeline.schedule=1f1b"],
}


def words_of(name, way):
    kind = ODD[name]
    more = (
        [f"epochs={3 if kind in BY_EPOCH else 1}"]
        + ["precision=bf16"] * (kind is SinglePart)
        + (STILL if kind in DRAWS else MOVING)
    )
    return [f"model.name={name}", *more, *way]


def trained(name, way, folder):
    """Losses, gradient norms and tensors of a run of this process, or why the model is refused."""
    norms = []
    step = Updater.step

    def noted(*args, **kwargs):
        norm = step(*args, **kwargs)
        norms.append(norm.item())
        return norm

    words = [word for word in words_of(name, way) if word != TWO]
    words += ["devices=[cpu]"] * (not any(word.startswith("devices=") for word in words))
    Updater.step = noted
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = train(*WORDS, *words, f"output={folder}")
    except RecipeError as error:
        return {"refused": str(error)}
    finally:
        Updater.step = step
    kept = checkpoint.load_newest(Path(folder), print).state
    tensors = {
        f"{kind} {n}": t.read()
        for kind in ("model", "optimizer")
        for n, t in kept.part(kind).items()
    }
    return {
        "losses": losses(folder),
        "norms": norms,
        "tensors": tensors,
        "val_loss": result["val_loss"],
    }


def spread(values):
    return (torch.tensor(values, dtype=torch.float64).std() / abs(sum(values) / len(values))).item()


def verdict(name, way, found, reference):
    """Compare a run with that of mode=single: "equal", "refused: ...", or how they differ."""
    if "refused" in found or "refused" in reference:
        if "refused" not in found:
            return "trains what mode=single refuses"
        named = any(word in found["refused"] for word in (name, "the model", "layer "))
        return f"{'refused' if named else 'refused without a name'}: {found['refused']}"
    if (
        ODD[name] in WHOLE_BATCH
        and way not in UNDIVIDED
        and (way, ODD[name]) != ("sync_bn", Normed)
    ):
        return "equal" if math.isfinite(found["val_loss"]) else "not finite"
    if ODD[name] in DRAWS and way not in UNDIVIDED:
        drawn = spread(found["losses"])
        expected = spread(reference["losses"])
        return (
            "equal"
            if drawn > expected / 4
            else f"draws move the losses by {drawn:.1e}, not {expected:.1e}"
        )
    close = CLOSE_IN_HALF if ODD[name] in HALF else CLOSE
    apart = {
        "losses": distance(found["losses"], reference["losses"]),
        "norms": distance(found["norms"], reference["norms"]),
        "val_loss": distance([found["val_loss"]], [reference["val_loss"]]),
    }
    if found["tensors"].keys() != reference["tensors"].keys():
        return (
            f"keeps other tensors: {sorted(found['tensors'].keys() ^ reference['tensors'].keys())}"
        )
    apart |= {
        key: distance(tensor, reference["tensors"][key]) for key, tensor in found["tensors"].items()
    }
    far = {key: value for key, value in apart.items() if not value < close}
    return (
        "equal"
        if not far
        else "; ".join(f"{key} {value:.1e} off" for key, value in [*far.items()][:4])
    )


def distance(found, reference):
    found, reference = (torch.as_tensor(each) for each in (found, reference))
    if found.shape != reference.shape:
        return math.inf
    kind = torch.complex128 if reference.is_complex() else torch.float64
    return (
        (found.to(kind) - reference.to(kind)).norm() / max(reference.to(kind).norm().item(), 1e-3)
    ).item()


def alone(name, way, folder):
    """Call `trained`; an error becomes a text."""
    try:
        return trained(name, way, folder)
    except Exception as error:  # a fault to be shown, whatever it is
        return f"broke: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def on_ranks(name, way, folder):
    """The same of two forked ranks; rank 0's."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {}
    for rank in range(2):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
                names |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": store.port,
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
                os.environ |= {key: str(value) for key, value in names.items()}
                torch.save(alone(name, way, folder / "run"), folder / f"{rank}.pt")
                code = 0
            finally:
                os._exit(code)
        ranks[child] = rank
    begun = time.monotonic()
    signals = []
    while ranks and time.monotonic() < begun + PATIENCE:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in ranks:
            rank = ranks.pop(child)
            if os.WIFSIGNALED(status):
                signals.append(f"rank {rank} ended by {signal.Signals(os.WTERMSIG(status)).name}")
                break
            if "losses" not in torch.load(folder / f"{rank}.pt"):
                # The exit ends the other ranks, like torchrun does.
                begun = min(begun, time.monotonic() - PATIENCE + 2)
        else:
            time.sleep(0.005)
    hung = [f"rank {rank} never ended" for rank in ranks.values()]
    for child in ranks:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    actual = [torch.load(path) for path in sorted(folder.glob("?.pt"))]
    refused = next((each for each in actual if isinstance(each, dict) and "refused" in each), None)
    if signals or (not refused and hung):
        return "; ".join([*signals, *hung, *(each for each in actual if isinstance(each, str))])
    return refused or "; ".join(each for each in actual if isinstance(each, str)) or actual[0]


def look(way, names, reference, home):
    """Return the verdict on a mode for each model."""
    run = on_ranks if TWO in WAYS[way] else alone
    verdicts = {}
    for name in names:
        folder = Path(home, way, name)
        folder.mkdir(parents=True)
        run_output = run(name, WAYS[way], folder if run is on_ranks else folder / "run")
        verdicts[name] = (
            run_output
            if isinstance(run_output, str)
            else verdict(name, way, run_output, reference[name])
        )
    return verdicts


def seldom(order, refusal, every, begin=fsdp_units.Order.__init__):
    """Ranks compare in each third pass, as on cards they do now and then."""
    begin(order, refusal, 3)


def main():
    ways = sys.argv[2].split(";")
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else [*ODD]
    with tempfile.TemporaryDirectory() as home:
        reference = {
            name: alone(name, ["mode=single"], Path(home, "single", name)) for name in names
        }
        for way in ways:
            if way == LATER:
                fsdp_units.FIRST_PASSES = 0
                fsdp_units.Order.__init__ = seldom
            begun = time.time()
            verdicts = look(way, names, reference, home)
            Path(sys.argv[1], f"{way}.json").write_text(json.dumps(verdicts, indent=1))
            print(way, f"{time.time() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()

"""Checks and timings for the first minutes on a machine with a GPU, which is available for a short
time and maybe without a network.

    python tests/first_minutes.py --out results --wheels wheels --seconds 480

Its parts, in this order: CUDA graphs, equal to the bit and timed; two ranks on one card over NCCL,
under graphs; a pipeline on one card compared with the whole model; the tests that need a card; what
of `prove` measures speed. Each may take its share of the time that is left when it begins, and one
that fails or hangs stops no other; what was not reached is printed. `--cpu` tries the script: all
of it, tiny, without graphs.

What the machine lacks of Python's packages is taken from a folder of wheels (`pip wheel --wheel-dir
wheels omegaconf pytest`, made where there is a network): those that are not installed are unpacked
for a Python of its own that also has all that is installed, so that neither pip nor a package index
is needed. `results` gets at most eight files of at most 16 MiB, while they grow: cut off at any
moment, it holds what was done by then. `results.jsonl` has a line for each figure, `results.md` the
table for the guide's page of figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
HOME = Path("runs/first_minutes")  # below the working folder
INSIDE = "FIRST_MINUTES"  # a variable: this Python is the one that has all packages
REPORT = ("proof.json", "proof.md", "kept.json")
LARGEST = 15 * 2**20  # bytes of a file that is brought home
LEAST, EVERY, GRACE = 5.0, 0.2, 10.0  # seconds: worth a start; between looks; to end in
# Fractions of the time.
SHARES = {"graphs": 4.0, "nccl": 0.5, "pipeline": 1.2, "tests": 3.0, "prove": 2.0}
CLOCKS = ("seconds", "samples_per_sec")  # columns of steps.csv that two equal runs differ in
ALWAYS = "optimizer.lr=0.0001 precision=bf16 epochs=1 logging.progress=false"
COMPARED = (
    "deterministic=true ema=0.99 clip_grad_norm=5 epochs=2 "
    "logging.every_steps=3 logging.verdict=false"
)
CARD = (
    "import torch; print(torch.cuda.get_device_name(0) if "
    "torch.cuda.is_available() else 'CPU', torch.__version__)"
)
FAST = """
from trainer import __main__ as cli
from trainer.commands.prove import proving

class Fast(proving.Proving):
    def _choose(self):
        every, self.checks = self.checks, [check for check in self.checks if check.part == "fast"]
        try:
            return super()._choose()
        finally:
            self.checks = every

proving.Proving = Fast
cli.main()
"""
Row = dict[str, Any]
Job = tuple[str, Callable[[], Row]]
Launchers = Sequence[list[str]]
LATE = "time was up"


@dataclass(frozen=True)
class Net:
    """A network to train on synthetic images, with its batch size and the number of steps that are
    timed.
    """

    title: str
    words: str
    batch: int
    steps: int
    exact: bool = True  # Whether all kernels have a deterministic version.

    def run_of(self, steps: int, *more: str) -> list[str]:
        words = (
            f"{self.words} batch_size={self.batch} data.name=synthetic "
            f"data.samples={self.batch * steps} {ALWAYS}"
        )
        return [*{word.partition("=")[0]: word for word in [*words.split(), *more]}.values()]


MUON = "model.name=fast_cnn data.image_size=32 optimizer.name=muon"
LARGE = "model.num_classes=1000 data.image_size=224 model.name="
NETS = (
    Net("ResNet-20, 32 px, batch 128", "model.name=resnet20 data.image_size=32", 128, 400),
    Net("ResNet-50, 224 px, batch 32", f"{LARGE}resnet50", 32, 100),
    Net("ResNet-50, 224 px, batch 64", f"{LARGE}resnet50", 64, 60),
    Net("ResNet-50, 224 px, batch 256", f"{LARGE}resnet50", 256, 30),
    Net("fast_cnn with Muon, 32 px, batch 128", MUON, 128, 200, exact=False),
    Net("ViT-B/16, 224 px, batch 64", f"{LARGE}vit_b_16 optimizer.name=adamw", 64, 50),
)
TINY = (
    Net("ResNet-8, 16 px, batch 16", "model.name=resnet8 data.image_size=16", 16, 2),
    Net(
        "vit_tiny with Muon, 32 px, batch 16",
        "model.name=vit_tiny data.image_size=32 optimizer.name=muon",
        16,
        2,
    ),
)


class Trip:
    """State that all parts use: the output folder, the remaining time, and how runs are started."""

    def __init__(
        self,
        home: Path,
        out: Path,
        cpu: bool,
        words: list[str],
    ) -> None:
        self.home = home
        self.out = out
        self.cpu = cpu
        self.words = words
        self.until = 0.0
        self.nets, self.warm, self.device = (TINY, 1, "cpu") if cpu else (NETS, 10, "cuda:0")
        self.flags = [[], []] if cpu else [["graphs=false"], ["graphs=true"]]
        self.most = 300.0 if cpu else 75.0  # seconds of a run; a CPU may be shared with other tests
        self.pair = "the same twice" if cpu else "graphs=true / graphs=false"
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TRAINER_PARENT": str(os.getpid()),
        }
        self.start: Any = subprocess.Popen
        with suppress(Exception):  # else each run imports torch for itself
            from tests import warm

            warm.run([sys.executable, "-c", "pass"], timeout=60, check=True)
            self.start = warm.Popen

    def left(self) -> float:
        return self.until - time.monotonic()

    def finish(
        self, children: list[subprocess.Popen], most: float, look: Callable[[], object] = time.time
    ) -> list[int]:
        """Return all exit codes; a process that is ended because time is up has 124.

        `look` is called during the wait.
        """
        end = min(self.until, time.monotonic() + most)
        try:
            while time.monotonic() < end and any(child.poll() is None for child in children):
                look()
                time.sleep(EVERY)
        finally:
            late = [child for child in children if child.poll() is None]
            for child in late:
                child.send_signal(signal.SIGTERM)  # The process keeps its finished parts.
            for child in late:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)
                child.kill()
                child.wait()
            look()
        return [124 if child in late else child.returncode for child in children]

    def train(
        self,
        runs: dict[str, list[str]],
        launchers: Launchers = (),
    ) -> list[Row]:
        """result.json of runs side by side, each of them by all the launchers.

        Raises RuntimeError.
        """
        children = []
        logs = []
        for name, words in runs.items():
            shutil.rmtree(self.home / name, ignore_errors=True)
            for rank, before in enumerate(launchers or [[]]):
                command = [
                    sys.executable,
                    *before,
                    "-m",
                    "trainer",
                    *words,
                    f"output={self.home / name}",
                ]
                variables = {
                    **self.environment,
                    "NCCL_HOSTID": f"host{rank}",
                    "NCCL_SOCKET_IFNAME": "lo",
                }
                if launchers:
                    # The variable names the process with which a rank ends: the launcher.
                    del variables["TRAINER_PARENT"]
                logs.append(
                    self.home / "logs" / f"{len(os.listdir(self.home / 'logs')):03}-{name}.log"
                )
                with logs[-1].open("w") as log:
                    print("$", *command, file=log, flush=True)
                    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                    children.append(self.start(command, env=variables, **streams))
        for code, log in zip(self.finish(children, self.most), logs, strict=True):
            if code:
                raise RuntimeError(
                    LATE if code == 124 else f"exit code {code}: {last_line(log)[:300]}"
                )
        return [json.loads((self.home / name / "result.json").read_text()) for name in runs]


def graphs(trip: Trip) -> Iterator[Job]:
    """Run each network with and without graphs: at the same time to compare, one after the other to
    time.
    """
    one = ["mode=single", f"devices=[{trip.device}]"]
    for net in trip.nets:
        if net.exact:
            yield (
                f"{net.title}, {trip.pair}",
                partial(compared, trip, net.run_of(12, *COMPARED.split(), *one)),
            )
        yield (
            f"{net.title}, {trip.pair}",
            partial(timed, trip, net, *([*one, *flags] for flags in trip.flags)),
        )


def nccl(trip: Trip) -> Iterator[Job]:
    """Run two launchers with one rank each.

    NCCL considers these ranks of two hosts, and lets them share a card.
    """
    words = trip.nets[0].run_of(12, *COMPARED.split(), "mode=ddp", *["devices=[cpu]"] * trip.cpu)
    met = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
    met += [f"--master_port={20_000 + os.getpid() % 9999}"]
    launchers = [["-m", "torch.distributed.run", *met, f"--node_rank={rank}"] for rank in range(2)]
    yield (
        f"{trip.nets[0].title}, two ranks on one device, {trip.pair}",
        partial(compared, trip, words, launchers),
    )


def pipeline(trip: Trip) -> Iterator[Job]:
    """Two stages on one device, after the whole model."""
    net = trip.nets[0] if trip.cpu else NETS[3]
    for flags in trip.flags:
        whole = ["mode=single", f"devices=[{trip.device}]", *flags]
        stages = [
            "mode=pipeline",
            f"devices=[{trip.device},{trip.device}]",
            "pipeline.microbatches=4",
            *flags,
        ]
        what = " ".join([f"{net.title}, two stages on one device, 4 micro-batches / whole", *flags])
        yield what, partial(timed, trip, net, whole, stages)


def compared(trip: Trip, words: list[str], launchers: Launchers = ()) -> Row:
    """Whether runs with and without graphs are equal to the bit, and whether one had
    graphs indeed.
    """
    runs = {
        name: [*words, *flags]
        for name, flags in zip(("launched", "replayed"), trip.flags, strict=True)
    }
    # The number of ranks is too large for this machine.
    apart = [{name: run} for name, run in runs.items()] if launchers else [runs]
    results = [result for each in apart for result in trip.train(each, launchers)]
    differ, count = differences(trip.home / "launched", trip.home / "replayed")
    figure = (
        f"DIFFERENT: {', '.join(differ[:3])}"
        if differ
        else f"equal to the bit: {count} tensors, and steps.csv"
    )
    return judged(
        trip,
        [*runs.values()],
        results,
        figure,
        not differ,
        differ=differ[:20],
    )


def timed(trip: Trip, net: Net, *sides: list[str]) -> Row:
    """The second of two runs in the first's speed."""
    words = [
        net.run_of(trip.warm + net.steps, f"logging.warmup_steps={trip.warm}", *side)
        for side in sides
    ]
    results = [trip.train({"timed": run})[0] for run in words]
    before, after = (result["throughput"]["samples_per_sec"] for result in results)
    figure = f"{after / before:.2f} times as fast: {after:,.0f} in place of {before:,.0f} images/s"
    kept = ("throughput", "step_time_s", "peak_memory_bytes", "verdict")
    return judged(
        trip,
        words,
        results,
        figure,
        runs=[{key: result.get(key) for key in kept} for result in results],
    )


def judged(
    trip: Trip,
    words: list[list[str]],
    results: list[Row],
    figure: str,
    right: bool = True,
    **more: Any,
) -> Row:
    """A row, with what the runs differ in; graphs that were not used are no answer."""
    ways = [result.get("graphs") for result in results]
    asked = ["replayed" if "graphs=true" in run else "launched" for run in words]
    if not trip.cpu and ways != asked:
        figure = f"{figure}; but graphs were: {ways[0]}, {ways[1]}"
        right = False
    return {"figure": figure, "command": words[1], "right": right, "graphs": ways, **more}


def differences(first: Path, second: Path) -> tuple[list[str], int]:
    """List the tensors and the columns of steps.csv, without the clocks, that two runs do not
    share; return the number of tensors, too.
    """
    from safetensors import deserialize  # The package may have been installed from a wheel by now.

    kept: list[dict[str, object]] = []
    for folder in (first, second):
        collected: dict[str, object] = {}
        for path in [
            folder / "last.safetensors",
            *sorted(folder.glob("checkpoints/*/*.safetensors")),
        ]:
            collected |= {
                f"{path.relative_to(folder)} {name}": one
                for name, one in deserialize(path.read_bytes())
            }
        count = len(collected)
        with (folder / "steps.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                collected |= {
                    f"step {row['step']} {key}": text
                    for key, text in row.items()
                    if key not in CLOCKS
                }
        kept.append(collected)
    return [
        name for name in {**kept[0], **kept[1]} if kept[0].get(name) != kept[1].get(name)
    ], count


def tests(trip: Trip) -> Iterator[Job]:
    marked = [
        str(path)
        for path in sorted(PROJECT.glob("tests/**/test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    words = ["-m", "pytest", "-m", "gpu", "-v", "--rootdir", str(PROJECT), *marked]
    yield "tests that need a card", partial(told, trip, words, ["test", "-m", "gpu"])


def prove(trip: Trip) -> Iterator[Job]:
    yield "what of prove measures speed", partial(proved, trip)


def proved(trip: Trip) -> Row:
    # A check that is running when the time is over may finish.
    minutes = f"minutes={0.9 * trip.left() / 60:.2f}"
    words = [
        "prove",
        minutes,
        f"output={trip.home / 'proof'}",
        *["devices=[cpu]"] * trip.cpu,
        *trip.words,
    ]
    row = told(trip, ["-c", FAST, *words], ["prove"])
    checks = json.loads((trip.home / "proof" / "proof.json").read_text())["checks"]
    finished = [
        check for check in checks if check["part"] == "fast" and check["status"] != "left out"
    ]
    more = [
        {"what": check["title"], "figure": check["line"], "right": check["status"] != "wrong"}
        for check in finished
    ]
    return {
        **row,
        "figure": f"{len(finished)} figures",
        "more": [{**each, "command": ["prove"]} for each in more],
    }


def told(trip: Trip, words: list[str], command: list[str]) -> Row:
    """Return the last line of a command, and keep its output."""
    log = trip.out / "parts.log"
    with log.open("a") as file:
        print("$ python", *words, file=file, flush=True)
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        child = subprocess.Popen([sys.executable, *words], env=trip.environment, **streams)
        (code,) = trip.finish(
            [child],
            trip.left(),
            lambda: bring(trip.home, trip.out),
        )
    if code == 124:
        raise RuntimeError(LATE)
    return {"figure": last_line(log), "command": command, "right": code == 0, "code": code}


def last_line(log: Path) -> str:
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][
        -1
    ].strip("= ")


def bring(home: Path, out: Path) -> None:
    """Copy the present report to the output folder."""
    for name in REPORT:
        source = home / "proof" / name
        if source.is_file() and source.stat().st_size < LARGEST:
            draft = out / f".{name}"
            shutil.copyfile(source, draft)
            draft.replace(out / name)


def bring_logs(home: Path, out: Path) -> None:
    """Write the output of all runs to one file: the smallest first, and as many as fit."""
    logs = [*(home / "logs").glob("*.log"), *(home / "proof" / "logs").glob("*.log")]
    size = 0
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for log in sorted(logs, key=lambda path: path.stat().st_size):
            size += log.stat().st_size
            if size < LARGEST:
                archive.add(log, log.name)


def unpacked(wheels: Path | None, site: Path) -> list[str]:
    """Return the paths of unpacked wheels that this Python does not have."""
    finished = []
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else ():
        name = wheel.name.split("-")[0]
        with suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            continue
        with zipfile.ZipFile(wheel) as whole:
            whole.extractall(site)
        finished.append(wheel.name)
    return finished


def python(home: Path, unpacked: Path) -> str:
    """An environment's Python that finds what this one has and what was unpacked, however its
    children are started.
    """
    venv.create(home / "venv", symlinks=True)
    own = next((home / "venv").glob("lib/python*/site-packages"))
    places = [str(unpacked), *site.getsitepackages()]
    (own / "first_minutes.pth").write_text(
        "".join(f"import site; site.addsitedir({place!r})\n" for place in places)
    )
    return str(home / "venv" / "bin" / "python")


def travel(trip: Trip, chosen: list[str], end: float) -> int:
    """Run all parts. Return 0, or 1 if something is wrong, or 124 if something was not reached."""
    parts = {"graphs": graphs, "nccl": nccl, "pipeline": pipeline, "tests": tests, "prove": prove}
    asked = trip.start(
        [sys.executable, "-c", CARD],
        stdout=subprocess.PIPE,
        text=True,
        env=trip.environment,
    )
    lines: list[str] = []
    codes = {0}

    def tell(row: Row) -> None:
        if not lines:
            card = asked.communicate()[0].strip()
            lines.extend(
                [
                    f"{card}, {os.cpu_count()} cores",
                    "",
                    "| what | figure | command |",
                    "| --- | --- | --- |",
                ]
            )
        codes.add({True: 0, False: 1, None: 124}[row["right"]])
        with (trip.out / "results.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        command = f"`{shlex.join(['./launch.sh', *row['command']])}`" if "command" in row else ""
        lines.append(f"| {row['what']} | {str(row['figure']).replace('|', '/')} | {command} |")
        (trip.out / "results.md").write_text("\n".join(lines) + "\n")
        print(f"[{row['part']}] {row['what']}: {row['figure']}", flush=True)

    for number, name in enumerate(chosen):
        share = SHARES[name] / sum(SHARES[later] for later in chosen[number:])
        trip.until = time.monotonic() + share * (end - time.monotonic())
        for what, work in parts[name](trip):
            row: Row = {"figure": "not reached", "right": None}
            begun = time.monotonic()
            if trip.left() > LEAST:
                try:
                    row = work()
                except Exception as error:
                    row = {
                        "figure": f"FAILED: {error}"[:400],
                        "right": None if str(error) == LATE else False,
                    }
            more = row.pop("more", [])
            tell(
                {
                    "part": name,
                    "what": what,
                    **row,
                    "seconds": round(time.monotonic() - begun, 1),
                }
            )
            for each in more:
                tell({"part": name, **each})
    print("\n".join(lines))
    return 1 if 1 in codes else max(codes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT") or "runs/first_minutes_results",
        help="for results",
    )
    parser.add_argument("--wheels", type=Path, help="a folder of wheels")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it")
    parser.add_argument("--only", choices=[*SHARES], action="append", help="these parts")
    parser.add_argument("--cpu", action="store_true", help="a try on the CPU, with tiny networks")
    parser.add_argument("words", nargs="*", help="words for prove, as in 'devices=[cpu,cpu]'")
    options = parser.parse_args()
    home = HOME.absolute()
    out = Path(options.out).absolute()
    inside = INSIDE in os.environ
    begun = float(os.environ.pop(INSIDE, 0) or time.monotonic())  # a clock of all processes
    if not inside:
        for folder in (out, home / "wheels", home / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        unpacked(options.wheels, home / "wheels")
        paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        interpreter = python(home, home / "wheels")
        words = [interpreter, "-m", "tests.first_minutes", *sys.argv[1:]]
        os.execve(
            interpreter,
            words,
            {**os.environ, "PYTHONPATH": paths, INSIDE: str(begun)},
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        trip = Trip(home, out, options.cpu, options.words)
        chosen = [part for part in SHARES if part in (options.only or SHARES)]
        return travel(trip, chosen, begun + options.seconds - GRACE)
    finally:
        bring(home, out)
        bring_logs(home, out)


if __name__ == "__main__":
    sys.exit(main())

"""The first minutes on a machine with a card that is at hand for a short while, perhaps without a network, in one go.

    python tests/first_minutes.py --out results --wheels wheels --minutes 9.5

`prove` runs first, then the tests that need a card. What the machine lacks of Python's packages is taken from a folder
of wheels (`pip wheel --wheel-dir wheels omegaconf pytest`, made where there is a network): those that are not installed
are unpacked for a Python of its own that also has all that is installed, so that neither pip nor a package index is
needed. `results` gets at most eight files of at most 16 MiB, while they grow: cut off at any moment, it holds what was
done by then. The same line goes on where it was, as `prove` does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
HOME = Path("runs/first_minutes")  # where it goes on from, below the working folder
REPORT = ("proof.json", "proof.md", "proof.png", "kept.json")
LARGEST = 15 * 2**20  # bytes of a file that is brought home
PROVING = 0.65  # of the minutes
LEAST, EVERY = 20.0, 2.0  # seconds for which tests are worth a start; between two looks


def unpacked(wheels: Path | None, site: Path) -> list[str]:
    """The wheels that were unpacked: those of distributions that this Python does not have."""
    done = []
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else ():
        name = wheel.name.split("-")[0]
        with suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            continue
        with zipfile.ZipFile(wheel) as whole:
            whole.extractall(site)
        done.append(wheel.name)
    return done


def python(home: Path, unpacked: Path) -> str:
    """An environment's Python that finds what this one has and what was unpacked, however its children are started."""
    venv.create(home / "venv", symlinks=True)
    own = next((home / "venv").glob("lib/python*/site-packages"))
    places = [str(unpacked), *site.getsitepackages()]
    (own / "first_minutes.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in places))
    return str(home / "venv" / "bin" / "python")


def bring(home: Path, out: Path) -> None:
    """Copy the report as it stands, and last words of all runs."""
    for name in REPORT:
        source = home / "proof" / name
        if source.is_file() and source.stat().st_size < LARGEST:
            draft = out / f".{name}"
            shutil.copyfile(source, draft)
            draft.replace(out / name)


def bring_logs(home: Path, out: Path) -> None:
    """The words of all runs, as one file: the smallest first, as many as fit."""
    logs = sorted((home / "proof" / "logs").glob("*.log"), key=lambda path: path.stat().st_size)
    size = 0
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for log in logs:
            size += log.stat().st_size
            if size < LARGEST:
                archive.add(log, log.name)


def run(words: list[str], log: Path, environment: dict[str, str], seconds: float, look) -> int:
    """Run to the end, or for so many seconds; the exit code, 124 where time was up. `look` is called meanwhile."""
    end = time.monotonic() + seconds
    with log.open("w") as file:
        print("$", *words, file=file, flush=True)
        child = subprocess.Popen(
            words, cwd=os.getcwd(), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while child.poll() is None and time.monotonic() < end and log.stat().st_size < LARGEST:
                look()
                time.sleep(min(EVERY, max(0.05, end - time.monotonic())))
        finally:
            late = child.poll() is None
            if late:
                child.send_signal(signal.SIGTERM)  # it keeps what is done
                with suppress(subprocess.TimeoutExpired):
                    child.wait(10)
                child.kill()
            child.wait()
            look()
    return 124 if late else child.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or "first_minutes", help="for results")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--only", choices=["prove", "tests"], help="one of the two")
    parser.add_argument("words", nargs="*", help="words for prove, as in 'devices=[cpu,cpu]'")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    home, out = HOME.absolute(), Path(options.out).absolute()
    wheels = home / "wheels"
    for folder in (out, wheels):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    unpacked(options.wheels, wheels)
    interpreter = python(home, wheels)
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment["TRAINER_PARENT"] = str(os.getpid())  # whom `prove` ends with
    codes = []

    def left() -> float:
        return end - time.monotonic()

    try:
        if options.only != "tests":
            minutes = options.minutes * (PROVING if options.only is None else 0.9)
            words = ["prove", f"minutes={minutes:.2f}", f"output={home / 'proof'}", *options.words]
            command = [interpreter, "-m", "trainer", *words]
            # A check that is at work when the minutes are over comes to its end.
            limit = left() - (LEAST if options.only is None else 5)
            codes.append(run(command, out / "prove.log", environment, limit, lambda: bring(home, out)))
        if options.only != "prove" and left() > LEAST:
            marked = [
                str(path) for path in sorted(PROJECT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text()
            ]
            command = [interpreter, "-m", "pytest", "-m", "gpu", "-v", "--rootdir", str(PROJECT), *marked]
            codes.append(run(command, out / "tests.log", environment, left() - 5, lambda: None))
    finally:
        bring(home, out)
        bring_logs(home, out)
    print(f"exit codes {codes}; {out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())

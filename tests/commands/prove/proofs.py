"""Proofs of this machine in which some checks are finished, so that a test runs only the others."""

import json
from pathlib import Path

from tests.command_line import PROJECT, trainer
from trainer.commands.prove import fast, find_devices, proving, right
from trainer.commands.prove.check_runner import CheckRunner, Devices
from trainer.commands.trials.report import read_machine
from trainer.training.reporting import list_versions

FAULTY = Path(__file__).parent / "faulty"
DEVICES = find_devices("[cpu,cpu]")
CHECKS = [check.name for check in (*right.list_checks(DEVICES), *fast.list_checks(DEVICES))]
CARD = "NVIDIA A100-SXM4-80GB"


def machine(kind, count):
    """Return `count` devices, which do not exist here."""
    names = ("cpu",) * count if kind == "cpu" else tuple(f"cuda:{n}" for n in range(count))
    return Devices(
        names, kind, ("CPU" if kind == "cpu" else CARD,) * count, 1 if kind == "cpu" else None
    )


def runner(tmp_path, devices, answers=None, result=None, error=None):
    """Return a runner with the given answers of measurements and the given result of runs."""
    one = CheckRunner(tmp_path, devices, {})
    one.measure = lambda what, count=1, **task: answers

    def train(name, words, environment=None, timed=False, resumes=False):
        if error is not None:
            raise error
        return result

    one.train = train
    return one


def begin(folder, *names):
    """A proof's folder in which all checks but `names` are done."""
    folder.mkdir()
    bound = proving.list_bindings(read_machine(), list_versions(), DEVICES.names)
    row = {"status": "right", "line": "done before", "todo": "", "figures": {}, "seconds": 1.0}
    rows = {name: row for name in CHECKS if name not in names}
    assert len(rows) == len(CHECKS) - len(names), "no such check"
    (folder / proving.KEPT).write_text(json.dumps({"asked": bound, "checks": rows}))
    return folder


def faulty(*faults):
    """The environment of a machine with faults."""
    return {"FAULTY_MACHINE": " ".join(faults), "PYTHONPATH": f"{FAULTY}:{PROJECT}"}


def prove(folder, *words, fault="", env=None, **options):
    """The real command, on a machine with faults."""
    env = {**faulty("quiet", fault), **(env or {})}
    return trainer(
        "prove",
        "devices=[cpu,cpu]",
        f"output={folder}",
        *(words or ["minutes=60"]),
        env=env,
        **options,
    )


def proof(folder):
    return json.loads((folder / "proof.json").read_text())


def found(folder, name):
    """Return the row of one check in proof.json."""
    return next(check for check in proof(folder)["checks"] if check["name"] == name)

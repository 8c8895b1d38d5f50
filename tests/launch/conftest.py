"""A working folder whose ranks run a small stand-in for training."""

from pathlib import Path

import pytest

from tests.command_line import PROJECT
from trainer.processes import family

STAND_IN = """
import json, os, signal, sys, time, types
from pathlib import Path
import trainer.training
from trainer import errors
from trainer.processes.interrupts import Interrupts
from trainer.processes.rank import read_place

def run(recipe, own_process=False, check=None):
    me, case = read_place(), os.environ.get("CASE", "")
    print(f"rank {me.rank} of {me.size} pid {os.getpid()} at {os.environ['MASTER_ADDR']}",
        flush=True)
    if case in ("nan", "kill"):
        if me.rank == 1 and case == "nan":
            raise errors.NotFiniteError("nan 3")
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        raise errors.PeerError("rank 0: lost another rank")
    if case == "early":
        with Interrupts(True, 60.0):
            time.sleep(1 if me.rank else 60)
        raise errors.RecipeError("rank 1 refuses")
    if case == "bug":
        raise ZeroDivisionError("a bug")
    if case == "save":
        heard = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: heard.append(number))
        print("ready", flush=True)
        while not heard:
            time.sleep(0.02)
        raise {2: errors.Interrupted, 15: errors.Preempted}[heard[0]]("stopped after step 3, saved")
    if case == "sleep":
        print("ready", flush=True)
        time.sleep(60)
    if recipe.output and me.rank == 0:
        Path(recipe.output).mkdir(parents=True, exist_ok=True)
        result = json.dumps({"world_size": me.size, "recipe": recipe.name})
        Path(recipe.output, "result.json").write_text(result)

module = types.ModuleType("trainer.training.loop")
module.run = run
sys.modules["trainer.training.loop"] = trainer.training.loop = module
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with the plugin, and an environment without variables about ranks."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    for name in ("NPROC", "NNODES", "RANK", "WORLD_SIZE", "CASE", "SLURM_STEP_ID", family.PARENT):
        monkeypatch.delenv(name, raising=False)
    return tmp_path

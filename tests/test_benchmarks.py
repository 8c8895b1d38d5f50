"""All benchmarks run.

Their results are for people: here they get too little work to measure anything.
"""

import sys

import numpy as np
import pytest
from PIL import Image

from tests import warm
from tests.command_line import PROJECT, environment

FOLDER = PROJECT / "tests" / "benchmarks"
COMMANDS = [
    "loop_cost.py --steps 60 --pairs 1",
    "other_trainers.py --model mlp --steps 60 --rounds 1",
    "photos.py --photos {photos} --count 48 --batch 4 --rounds 1",
    "photos.py --photos {photos} --count 48 --batch 4 --rounds 1 --megapixels 1",
    "pipeline_tuning.py --model resnet18 --size 64 --batch 48 --rounds 1",
    "plan_accuracy.py --rounds 1 --steps 4 --only resnet18",
    "start_of_ranks.py --rounds 1",
    "unequal_ranks.py 0.0001,0.0003 1",
    "workers.py ddp --batch 8 --size 32 --steps 4 --rounds 1",
    "workers.py pipeline --batch 48 --size 64 --steps 3 --rounds 1",
    "workers.py hogwild --batch 8 --size 32 --steps 4 --rounds 1",
    "workers.py local_sgd --batch 8 --size 32 --steps 4 --rounds 1",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (80, 100, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return folder


def test_none_is_forgotten():
    assert {command.split()[0] for command in COMMANDS} == {
        path.name for path in FOLDER.glob("*.py")
    }


@pytest.mark.full("a few minutes, on two cores")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs(command, photos, tmp_path):
    name, *words = command.format(photos=photos).split()
    for library in ("accelerate", "lightning") * (name == "other_trainers.py"):
        pytest.importorskip(library)
    command = [sys.executable, str(FOLDER / name), *words]
    completed = warm.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]

"""A measurement here, through the real command line."""

import json
import subprocess
import sys

import pytest

from tests.commands import environment


@pytest.mark.parametrize("mode", ["pipeline", "ddp"])
def test_measured_here(mode, full):
    if mode == "ddp" and not full:
        pytest.skip("a sample of the modes; --all measures both")
    words = [f"mode={mode}", "threads=1", "batch_size=96", "recipe=digits", "nproc=2", "measured=here", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "plan", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_samples_per_sec"] > 0
    assert found["prediction"]["compute_seconds"] > 0
    if mode == "pipeline":
        assert found["pipeline"]["balanced_by"] == "seconds"

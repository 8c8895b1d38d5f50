"""A measurement here, through the real command line."""

import json

import pytest

from tests.command_line import ok


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "ddp"])
def test_measured_here(mode, full):
    if mode == "ddp" and not full:
        pytest.skip("a sample of the modes; --all measures both")
    words = [f"mode={mode}", "threads=1", "batch_size=96", "recipe=digits", "nproc=2", "measured=here", "--json"]
    found = json.loads(ok("plan", *words).stdout)
    assert found["predicted_samples_per_sec"] > 0
    assert found["prediction"]["compute_seconds"] > 0
    if mode == "pipeline":
        assert found["pipeline"]["balanced_by"] == "seconds"

"""A measurement here, through the real command line."""

import json

import pytest

from tests.command_line import ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["pipeline", pytest.param("ddp", marks=pytest.mark.full("a sample of the modes"))]
)
def test_measured_here(mode):
    words = [
        f"mode={mode}",
        "threads=1",
        "batch_size=96",
        "recipe=digits",
        "nproc=2",
        "measured=here",
        "--json",
    ]
    report = json.loads(ok("plan", *words).stdout)
    assert report["predicted_samples_per_sec"] > 0 and report["prediction"]["compute_seconds"] > 0
    assert mode == "ddp" or report["pipeline"]["balanced_by"] == "seconds"

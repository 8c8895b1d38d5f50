"""Messages if memory is short."""

import re

import pytest

from tests.command_line import QUIET, ok, result, trainer


@pytest.mark.slow(cases=["mode=single batch_size=66 accumulate=3-6"])
@pytest.mark.parametrize(
    ("mode", "pieces"),
    [
        ("mode=single", 2),
        ("mode=single batch_size=66 accumulate=3", 6),  # 66 is no multiple of 4 or 5
        pytest.param(
            "mode=pipeline devices=[cpu,cpu] model.name=cnn_gn", 2, marks=pytest.mark.full
        ),
    ],
)
def test_a_run_out_of_memory_says_what_takes_it_and_a_key_that_works(mode, pieces, tmp_path):
    words = ["recipe=digits", *mode.split(), "max_steps=3", *QUIET]
    completed = trainer(*words, f"output={tmp_path / 'full'}", env={"TRAINER_FAULT": "oom@0:2"})
    assert completed.returncode == 6, completed.stderr
    assert re.search(r"\boptimizer .*\d [KMG]iB; ", completed.stderr), completed.stderr
    match = re.search(r"type (accumulate=(\d+)) or more, ", completed.stderr)
    assert match and int(match[2]) == pieces, completed.stderr
    assert result(tmp_path / "full")["error"] in completed.stderr
    ok(
        *(word for word in words if not word.startswith("accumulate=")),
        match[1],
        f"output={tmp_path / 'fits'}",
    )

"""Which rank's failure explains the others."""

import pytest

from trainer.launch.endings import Ending, first_cause


@pytest.mark.parametrize(
    ("endings", "rank", "code", "line"),
    [
        ([Ending(0, 7, "lost", 1.0), Ending(1, 5, "nan", 2.0)], 1, 5, "nan"),
        ([Ending(0, -15, "", 1.0), Ending(1, 1, "", 2.0)], 1, 1, "rank 1 ended with exit code 1"),
        ([Ending(0, 143, "saved", 1.0), Ending(1, 7, "lost", 2.0)], 1, 7, "lost"),
        ([Ending(0, 7, "lost", 1.0), Ending(1, -9, "", 2.0)], 1, 7, "rank 1 was killed by SIGKILL (the system may be "),
        ([Ending(0, -11, "", 1.0), Ending(1, 7, "lost", 0.0)], 0, 7, "rank 0 was killed by SIGSEGV"),
        ([Ending(0, 3, "b", 2.0), Ending(1, 2, "a", 1.0)], 1, 2, "a"),
        ([Ending(1, 2, "same", 1.0), Ending(0, 2, "same", 1.0)], 0, 2, "same"),
        ([Ending(0, 7, "rank 1 was silent", 1.0), Ending(1, -9, "", 32.0)], 0, 7, "rank 1 was silent"),  # torchrun's
        ([Ending(0, 143, "saved", 1.0), Ending(1, 143, "saved", 1.0)], 0, 143, "saved"),
        ([Ending(0, -2, "", 1.0), Ending(1, 7, "lost", 0.5)], 0, 130, "rank 0 was killed by SIGINT"),
        ([Ending(0, -15, "", 1.0)], 0, 143, "rank 0 was killed by SIGTERM"),
        ([Ending(0, -64, "", 1.0)], 0, 7, "rank 0 was killed by "),
    ],
)
def test_the_first_cause(endings: list[Ending], rank: int, code: int, line: str) -> None:
    found = first_cause(endings)
    assert (found.rank, found.code) == (rank, code)
    assert found.line.startswith(line)

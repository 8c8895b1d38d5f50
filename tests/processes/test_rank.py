"""Variables of torchrun, and the name of a job."""

import pytest

from tests.command_line import python
from trainer.errors import SetupError
from trainer.processes.rank import Place, build_job_id, read_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_place():
    assert read_place({}) == Place()
    me = read_place(TORCHRUN)
    assert (
        me.rank,
        me.size,
        me.local_rank,
        me.local_size,
        me.restarts,
        me.launched,
    ) == (
        3,
        4,
        1,
        2,
        1,
        True,
    )
    assert not me.is_main and read_place({}).is_main
    with pytest.raises(SetupError, match="RANK"):
        read_place({**TORCHRUN, "RANK": "x"})


def test_jobs_have_names_of_their_own():
    ours = build_job_id()
    completed = python(
        "-c", "from trainer.processes.rank import build_job_id; print(build_job_id())"
    )
    assert ours == build_job_id() != completed.stdout.strip() != ""

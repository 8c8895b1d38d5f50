"""What torchrun's variables say, and a job's name."""

import pytest

from tests.command_line import python
from trainer.errors import SetupError
from trainer.processes.rank import Place, job_id, place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_place():
    assert place({}) == Place()
    me = place(TORCHRUN)
    assert (me.rank, me.size, me.local_rank, me.local_size, me.restarts, me.launched) == (3, 4, 1, 2, 1, True)
    assert not me.is_main and place({}).is_main
    with pytest.raises(SetupError, match="RANK"):
        place({**TORCHRUN, "RANK": "x"})


def test_jobs_have_names_of_their_own():
    ours = job_id()
    done = python("-c", "from trainer.processes.rank import job_id; print(job_id())")
    assert ours == job_id() != done.stdout.strip() != ""

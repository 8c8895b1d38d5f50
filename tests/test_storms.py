"""Whole jobs under kills, signals and stops; `python -m tests.storms` runs longer ones."""

from __future__ import annotations

import os
import random
import signal

import pytest
from safetensors.torch import load_file, save_file

from tests import warm
from tests.storms import HITS, MODES, SEVERAL, TIMEOUT, WORDS, Job, Storms, same, slack, strike

SEED = 1


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    return Storms(tmp_path_factory.mktemp("storms"), SEED)


@pytest.mark.parametrize("name", HITS)
@pytest.mark.full("170 hits, twenty minutes")
def test_no_step_is_lost(storms, name):
    kinds, modes, count = HITS[name]
    assert (
        len(
            storms.run(
                kinds,
                count,
                [mode for mode in modes if mode in MODES],
            )
        )
        == count
    )


@pytest.mark.slow
def test_a_stopped_rank_is_named_in_time(tmp_path):
    """The other ranks wait `timeout` seconds. torchrun alone would wait thirty more for a stopped
    process.
    """
    with Job(
        tmp_path / "run", *WORDS, *MODES["ddp"], f"timeout={TIMEOUT}", start=warm.Popen
    ) as job:
        assert strike(job, "stop", "steps", random.Random(SEED))


@pytest.mark.full("a storm of its own")
@pytest.mark.parametrize("mode", ["ddp", "1f1b", "local_sgd", "hogwild"])
def test_a_job_that_is_stopped_as_a_whole_goes_on(mode, tmp_path):
    """The job is stopped for longer than `timeout`, like under SLURM's suspend, and has the losses
    of an undisturbed run.
    """
    storms = Storms(tmp_path, SEED, warm.Popen)
    assert len(storms.storm(mode, ["pause"])) == 1
    whole = tmp_path / f"whole {mode}"
    if whole.is_dir():  # a weight that differs by little is seen
        file = tmp_path / f"1 {mode}" / "last.safetensors"
        weights = load_file(file)
        next(iter(weights.values())).view(-1)[0] += 1e-6
        save_file(weights, file)
        with pytest.raises(AssertionError, match="last"):
            same(file.parent, whole)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True], ids=["ours", "the user's"])
def test_a_launcher_that_is_killed_in_a_start_leaves_no_rank(tmp_path, torchrun):
    """The launcher may be killed before the ranks ask to die with it; they then end as soon as they
    start.
    """
    with Job(tmp_path / "run", *WORDS, *MODES["ddp"], torchrun=torchrun) as job:
        while not any(job.members().values()):
            assert job.main.poll() is None, job.text()
        job.main.kill()
        job.end(5.0 * slack())


# Faults of TRAINER_FAULT with their exit codes; `reader` is the last rank that reads images.
FAULTS = {
    "nan@{reader}:17": {5},
    "oom@{last}:17": {6},
    "kill@{last}:17": {7, 137},
    "hang@{last}:17": {7},
    "full@save:write": {28},
    "full@save:fsync": {28},
    "kill@save:rename": {7, 137},
    "kill@save:prune": {7, 137},
    "full@save#{last}:write": {28},
}
# Folder, arguments and exit code of runs that end before their first step: the batch cannot be
# divided, or files cannot be read or written.
REFUSED = [
    ("refused", ["batch_size=5000"], 2),
    ("refused", ["data.name=imagefolder", "data.root=nowhere"], 3),
    ("/dev/null/run", [], 3),
]


@pytest.mark.full("a quarter of an hour")
@pytest.mark.parametrize("mode", MODES)
def test_each_fault_ends_each_mode_with_its_code_and_the_run_goes_on(mode, tmp_path):
    """No process and no shared memory remain, and the resumed run has the losses and weights of the
    undisturbed one.
    """
    storms = Storms(tmp_path, SEED, warm.Popen)
    several = mode in SEVERAL
    last = (4 if mode == "1f1b 2x2" else 2) - 1 if several else 0
    reader = 0 if "mode=pipeline" in MODES[mode] else last
    words = [*WORDS, *MODES[mode]]
    for number, (fault, codes) in enumerate(FAULTS.items()):
        if not several and ("hang" in fault or "#" in fault):
            continue  # nobody is there to notice; it is rank 0 that saves
        folder = tmp_path / str(number)
        fault = fault.format(last=last, reader=reader)
        with Job(folder, *words, f"timeout={TIMEOUT}", start=storms.start, fault=fault) as job:
            job.ends(120, *codes)
        storms.finish(folder, *words)
        storms.compare(mode, folder, words)
    for name, more, expected in REFUSED:
        with Job(tmp_path / name, *words, *more, start=storms.start) as job:
            job.ends(60, expected)
    with Job(tmp_path / "busy", *words, start=storms.start) as busy:
        while not (tmp_path / "busy" / ".lock").exists():
            assert busy.main.poll() is None, busy.text()
        members = [*busy.members()]
        for pid in members:
            os.kill(pid, signal.SIGSTOP)  # The rank would end before the other one has started.
        with Job(tmp_path / "busy", *words, start=storms.start) as other:
            other.ends(60, 8)
        for pid in members:
            os.kill(pid, signal.SIGCONT)
        busy.ends(120, 0)

"""Ranks and nodes as a table: arguments, variables, SLURM, devices, cores."""

from __future__ import annotations

import re

import pytest

from tests.checks import refusal
from trainer.devices import cards
from trainer.launch.topology import Launch, choose_launch, first_host, task_of_node
from trainer.processes import resources
from trainer.recipe import load

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234567",
}
STEP |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_LOCALID": "0"}


def ompi(
    local: int,
    here: int,
    rank: int,
    size: int,
) -> dict[str, str]:
    """Return the variables that Open MPI sets for a process."""
    values = {"LOCAL_RANK": local, "LOCAL_SIZE": here, "RANK": rank, "SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


MPICH = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "6"}
PET = {
    "PET_NNODES": "2:2",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "head:1234",
    "PET_NPROC_PER_NODE": "2",
}
NODES = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "first"}


# The message says that there is one task per node.
@pytest.mark.parametrize(
    ("environment", "nproc", "words", "cuda", "cores", "expected"),
    [
        # Cases of a single node: argument, variable, devices, GPUs, cores
        ({}, None, (), 0, 8, Launch(2)),
        ({}, None, (), 0, 1, Launch(1)),
        ({}, None, (), 4, 8, Launch(4)),
        ({}, None, ("devices=[cuda:2,cuda:3]",), 4, 8, Launch(2)),
        ({}, None, ("devices=[cpu]",), 4, 8, Launch(2)),
        ({}, None, ("devices=[cpu,cpu,cpu]",), 4, 8, Launch(3)),
        ({"NPROC": "3"}, None, ("devices=[cuda:2,cuda:3]",), 4, 8, Launch(3)),
        ({"NPROC": "3"}, "1", ("devices=[cuda:2,cuda:3]",), 4, 8, Launch(1)),
        ({"NPROC": ""}, None, (), 0, 8, Launch(2)),
        ({"NNODES": "1", "MASTER_ADDR": "x", "MASTER_PORT": "5"}, None, (), 0, 8, Launch(2)),
        ({}, None, ("mode=single",), 4, 8, Launch(1)),
        ({}, "2", ("mode=single",), 4, 8, Launch(2)),  # refused by check_processes
        # several nodes
        (NODES, "4", (), 0, 8, Launch(4, 3, 2, "first", 29500)),
        ({**NODES, "MASTER_PORT": "1234"}, None, (), 8, 8, Launch(8, 3, 2, "first", 1234)),
        # Variables of torchrun, which ours override
        ({"PET_NPROC_PER_NODE": "3"}, None, (), 0, 8, Launch(3)),
        ({"PET_NPROC_PER_NODE": "3", "NPROC": "4"}, None, (), 0, 8, Launch(4)),
        ({"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "1"}, None, (), 4, 8, Launch(4)),
        (
            {f"PET_{key}": value for key, value in NODES.items()},
            "4",
            (),
            0,
            8,
            Launch(4, 3, 2, "first", 29500),
        ),
        (PET, None, (), 0, 8, Launch(2, 2, 1, "head", 1234)),
        # SLURM, inside a step only; a variable that is set wins
        (STEP, None, (), 4, 8, Launch(4, 2, 1, "gpu07", 10000 + 1234567 % 20000)),
        ({**STEP, "MASTER_PORT": "77", "NPROC": "1"}, None, (), 4, 8, Launch(1, 2, 1, "gpu07", 77)),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, None, (), 4, 8, Launch(4)),
        (
            {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"},
            None,
            (),
            4,
            8,
            Launch(4),
        ),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"},
            None,
            (),
            0,
            8,
            Launch(3, 2, 1, "gpu07", 24567),
        ),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            None,
            (),
            4,
            8,
            Launch(4, 2, 1, "gpu07", 24567),
        ),
        # mpirun and its like: as many ranks as they started here; one a node starts all of the
        # node's
        (ompi(0, 3, 0, 3), None, (), 0, 8, Launch(3)),
        (ompi(0, 3, 0, 3), "4", (), 0, 8, Launch(4)),
        (ompi(0, 1, 0, 1), None, (), 4, 8, Launch(4)),
        (ompi(0, 1, 0, 1), None, ("mode=single",), 4, 8, Launch(1)),
        (
            {**ompi(0, 3, 0, 3), "RANK": "0", "WORLD_SIZE": "1"},
            None,
            ("mode=single",),
            4,
            8,
            Launch(1),
        ),
        ({**ompi(1, 2, 5, 6), "MASTER_ADDR": "a"}, None, (), 0, 8, Launch(2, 3, 2, "a", 29500)),
        (
            {**STEP, **ompi(0, 1, 1, 2), "MASTER_ADDR": "a"},
            None,
            (),
            4,
            8,
            Launch(4, 2, 1, "a", 29500),
        ),
        (MPICH, None, (), 0, 8, Launch(2)),
        (
            {**FLUX, **NODES},
            "4",
            (),
            0,
            8,
            Launch(4, 3, 2, "first", 29500),
        ),
        # Cases of an Indexed Job of Kubernetes: the node's number if there are several
        ({"JOB_COMPLETION_INDEX": "5"}, None, (), 0, 8, Launch(2)),
        (
            {**NODES, "NODE_RANK": "", "JOB_COMPLETION_INDEX": "1"},
            "4",
            (),
            0,
            8,
            Launch(4, 3, 1, "first", 29500),
        ),
        ({**NODES, "JOB_COMPLETION_INDEX": "1"}, "4", (), 0, 8, Launch(4, 3, 2, "first", 29500)),
    ],
)
def test_topology(
    environment: dict[str, str],
    nproc: str | None,
    words: tuple[str, ...],
    cuda: int,
    cores: int,
    expected: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cards, "detect", lambda: cards.Cards(cuda))
    monkeypatch.setattr(resources, "count_cores", lambda: cores)
    assert choose_launch(environment, nproc, load(None, *words)) == expected


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cards and two cores, whatever machine this is."""
    monkeypatch.setattr(cards, "detect", lambda: cards.Cards(0))
    monkeypatch.setattr(resources, "count_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_gpus_are_counted_only_where_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> cards.Cards:
        raise AssertionError("counted")

    monkeypatch.setattr(cards, "detect", never)
    for environment, nproc, words in (
        ({}, "2", ()),
        ({"NPROC": "2"}, None, ()),
        ({}, None, ("devices=[cpu]",)),
    ):
        assert choose_launch(environment, nproc, load(None, *words)).nproc == 2


@pytest.mark.parametrize(
    ("environment", "nproc", "expected"),
    [
        ({}, "two", r"^nproc=two .*\b1 to 4096$"),
        ({}, "0", r"^nproc=0 .*\b1 to 4096$"),
        ({}, "-1", r"^nproc=-1 .*\b1 to 4096$"),
        ({"NPROC": "1.5"}, None, r"^NPROC=1\.5 .*\b1 to 4096$"),
        ({"NNODES": "many"}, None, r"^NNODES=many .*\b1 to 65536$"),
        (
            {"PET_NNODES": "1:3"},
            None,
            "set NNODES=3",
        ),
        ({"PET_NPROC_PER_NODE": "x"}, None, r"^PET_NPROC_PER_NODE=x .*\b1 to 4096$"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "5", "PET_MASTER_ADDR": "a"},
            None,
            r"^PET_NODE_RANK=5 .*\b0 to 1$",
        ),
        ({"NNODES": "0"}, None, r"^NNODES=0 .*\b1 to 65536$"),
        (
            {"NNODES": "2"},
            None,
            r"^NNODES=2 .*NODE_RANK and MASTER_ADDR: .*NODE_RANK=0 to 1,",
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, None, "NNODES=2 needs MASTER_ADDR: "),
        ({**NODES, "NODE_RANK": "3"}, None, r"^NODE_RANK=3 .*\b0 to 2$"),
        ({**NODES, "MASTER_PORT": "http"}, None, r"^MASTER_PORT=http .*\b1 to 65535$"),
        ({**NODES, "MASTER_PORT": "70000"}, None, r"^MASTER_PORT=70000 .*\b1 to 65535$"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[a-b]"}, None, r"gpu\[a-b\].*\bMASTER_ADDR\b"),
        (
            FLUX,
            None,
            r"^6 tasks .*NNODES, NODE_RANK and MASTER_ADDR",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None, r"^2 tasks .*NNODES, NODE_RANK and MASTER_ADDR"),
        (ompi(0, 1, 1, 2), None, "NNODES=2 needs MASTER_ADDR: "),
        (
            ompi(0, 2, 1, 4),
            None,
            "NNODES=2 needs NODE_RANK and MASTER_ADDR: ",
        ),  # ranks go round the nodes
    ],
)
@pytest.mark.usefixtures("two_cores")
def test_an_inconsistent_launch_is_one_line(
    environment: dict[str, str], nproc: str | None, expected: str
) -> None:
    message = refusal(choose_launch, environment, nproc, load(None))
    assert re.search(expected, message), message


STREAMS = ("mode=pipeline", "pipeline.schedule=streams")
PMI2 = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "PMI_RANK": "1",
}


# A task per node needs no MASTER_ADDR.
@pytest.mark.parametrize(
    ("environment", "nproc", "words", "names"),
    [
        *(
            (ompi(0, 2, 0, 2), None, (f"mode={mode}",), f"mode={mode}")
            for mode in ("single", "dp", "split")
        ),
        (ompi(1, 2, 1, 2), None, STREAMS, "mode=pipeline"),
        (
            ompi(0, 1, 0, 2),
            None,
            ("mode=single",),
            "mode=single",
        ),
        (MPICH, None, ("mode=single",), "mode=single"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None, ("mode=single",), "mode=single"),
        (PMI2, None, ("mode=single",), "mode=single"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None, ("mode=single",), "mode=single"),
        (ompi(0, 2, 0, 2), "1", (), "nproc=1"),
        ({**ompi(0, 2, 0, 2), "NPROC": "1"}, None, (), "NPROC=1"),
    ],
)
@pytest.mark.usefixtures("two_cores")
def test_tasks_that_would_each_train_alone_are_refused(
    environment: dict[str, str], nproc: str | None, words: tuple[str, ...], names: str
) -> None:
    line = refusal(choose_launch, environment, nproc, load(None, *words))
    assert line.startswith(names) and "started 2" in line and "MASTER_ADDR" not in line
    alone = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_TASKS_PER_NODE"), "1")
    choose_launch(
        {**environment, "SLURM_STEP_NUM_NODES": "1", **alone},
        nproc,
        load(None, *words),
    )


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, 0),
        (ompi(1, 2, 5, 6), 1),
        ({**ompi(1, 2, 5, 6), "RANK": "0", "WORLD_SIZE": "1"}, 0),  # a rank
        ({**STEP, "SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "3"}, 0),
        ({**STEP, "SLURM_LOCALID": "0", **ompi(1, 2, 1, 2)}, 1),  # mpirun within a step
        ({**MPICH, "MPI_LOCALRANKID": "1"}, 1),
    ],
)
def test_tasks_of_a_node(environment: dict[str, str], task: int) -> None:
    assert task_of_node(environment) == task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a.c,b", "a.c"),
        ("node[003-005,9],gpu1", "node003"),
        ("n[1,3]-ib,m", "n1-ib"),
        ("r[0-1]n[2-3]", "r0n2"),
    ],
)
def test_the_first_host(text: str, expected: str) -> None:
    assert first_host(text) == expected

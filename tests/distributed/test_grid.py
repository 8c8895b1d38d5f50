"""Ranks on a grid, and the groups and the mesh of real processes along it."""

import json
import textwrap

import pytest

from tests import warm
from tests.command_line import python
from trainer.distributed.grid import Grid


def test_the_last_dimension_is_of_neighbours():
    grid = Grid(5, {"replicas": 2, "stages": 4})
    assert (grid.coordinate("replicas"), grid.coordinate("stages")) == (1, 1)
    assert grid.ranks("stages") == [4, 5, 6, 7]
    assert grid.ranks("replicas") == [1, 5]
    assert grid.lines("stages") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.lines("replicas") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert grid.ranks("shards") == [5] and grid.size("shards") == 1, (
        "a dimension that the grid does not have"
    )


@pytest.mark.parametrize("rank", range(12))
def test_lines_along_a_dimension_are_every_rank_once(rank):
    grid = Grid(rank, {"a": 2, "b": 3, "c": 2})
    for dimension in grid.sizes:
        lines = grid.lines(dimension)
        assert sorted(rank for line in lines for rank in line) == [*range(12)]
        assert [line for line in lines if rank in line] == [grid.ranks(dimension)]


SCRIPT = """
    import json, os, sys
    import torch
    from pathlib import Path
    from trainer.distributed.world_setup import create_world
    from trainer.recipe import load

    world = create_world(load(None, "mode=ddp", "devices=[cpu]"))
    world.connect(60.0)
    world.arrange({"replicas": 2, "shards": 2}, groups={"shards": 2})
    mine = lambda: torch.tensor([10.0 ** world.rank])
    mesh = world.mesh()
    found = {
        "all": world.sum_(mine()).item(),
        "replicas": world.sum_(mine(), "replicas").item(),
        "shards": world.sum_(mine(), "shards").item(),
        "first replica": world.broadcast_(mine(), "replicas").item(),
        "groups": len({world.group("shards").group_name, world.group("shards", 1).group_name}),
        "mesh": [mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate()],
        "same groups": mesh.get_group("shards") is world.group("shards"),
        "tensors": [sorted((name, *tensor.shape) for name, tensor in part.items())
                    for part in world.gather_tensors({f"of {world.rank}":
                                                      torch.zeros(world.rank, 2)})],
    }
    world.arrange({"replicas": 1, "shards": 4})
    found["flat"] = [world.mesh().mesh_dim_names, world.mesh().mesh.tolist()]
    (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))
    world.close()
    os._exit(0)  # to take all modules apart takes a second
"""


def test_groups_and_the_mesh_of_two_by_two_processes(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    completed = python(*launch, script, tmp_path, start=warm.run, timeout=120)
    assert completed.returncode == 0, completed.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["all"] for rank in ranks] == [1111] * 4
    assert [rank["replicas"] for rank in ranks] == [101, 1010, 101, 1010]
    assert [rank["shards"] for rank in ranks] == [11, 11, 1100, 1100]
    assert [rank["first replica"] for rank in ranks] == [1, 10, 1, 10]
    names = [["replicas", "shards"], [[0, 1], [2, 3]]]
    assert [rank["mesh"] for rank in ranks] == [
        [*names, place]
        for place in (
            [0, 0],
            [0, 1],
            [1, 0],
            [1, 1],
        )
    ]
    assert all(rank["same groups"] and rank["groups"] == 2 for rank in ranks)
    assert all(rank["flat"] == [["shards"], [0, 1, 2, 3]] for rank in ranks)
    assert ranks[0]["tensors"] == [[[f"of {rank}", rank, 2]] for rank in range(4)]
    assert all(rank["tensors"] == [] for rank in ranks[1:])

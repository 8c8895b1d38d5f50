"""Properties of mode=fsdp alone: its units, what it refuses, and its shards on other numbers of
ranks.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext

import pytest
from safetensors.torch import load_file
from torch import nn

from tests import warm
from tests.command_line import PROJECT, QUIET, environment, ok, result
from tests.models import families
from tests.modes.ways import EXACT
from tests.training.whole_runs import EPOCH, assert_ends_like, kill, newest
from trainer.errors import RecipeError
from trainer.memory.needs import compute_unit_sizes
from trainer.modes.fsdp_units import find_units
from trainer.recipe import load
from trainer.recipe.checks import check_processes
from trainer.saving.journal import JOURNAL, read_journal


class Tied(nn.Module):
    """A model of two blocks with one shared weight, an unused block, and a tiny one."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 64, bias=False),
        )
        self.last.weight = self.first.weight
        self.table = nn.ModuleDict({"a": nn.Linear(64, 64)})
        self.tiny = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x))) + self.table["a"](x)


def test_units_are_blocks_that_are_called_and_share_nothing():
    model = Tied()
    assert find_units(model) == ["middle"]
    root, middle = compute_unit_sizes(model, find_units(model))
    assert middle == 4 * (64 * 64 + 64)
    assert root + middle == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("words", "processes", "told"),
    [
        ("fsdp.shards=2", 4, None),
        ("fsdp.shards=4", 4, None),
        ("fsdp.shards=3", 4, r"fsdp\.shards=3.*nproc=3"),
        ("fsdp.shards=8", 4, r"fsdp\.shards=8.*nproc=8"),
        ("fsdp.offload=true precision=bf16", 2, None),
        ("fsdp.offload=true precision=fp16", 2, r"fsdp\.offload=true.*precision=bf16"),
        ("fsdp.offload=true", 1, r"fsdp\.offload=true.*nproc=2"),
        ("graphs=true", 2, None),
        ("fsdp.offload=true graphs=true", 2, r"graphs=true.*fsdp\.offload=false"),
        ("fsdp.offload=true graphs=auto", 2, None),
    ],
)
def test_shards_divide_the_processes_and_the_host_holds_those_of_several(words, processes, told):
    recipe = load(None, "mode=fsdp", "batch_size=64", *words.split())
    with nullcontext() if told is None else pytest.raises(RecipeError, match=told):
        check_processes(recipe, processes)


def run_on_two_ranks(script, *words, timeout):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        script,
        *words,
    ]
    command = [*map(str, command)]
    completed = warm.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout, cwd=PROJECT
    )
    assert completed.returncode == 0, completed.stderr


@pytest.mark.slow
def test_shards_go_on_in_any_other_layout(tmp_path):
    """Killed again and again, and continued on other ranks: one run, with its momentum and moving
    average.
    """
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    ok(*EPOCH, "mode=single", f"output={whole}")
    ring = [
        EXACT["fsdp"],
        EXACT["fsdp 4"],
        EXACT["fsdp 2x2"],
        EXACT["ddp"],
        EXACT["fsdp"],
    ]
    words = [*EPOCH, "save.every_steps=4", "resume=auto", f"output={run}"]
    for turn, mode in enumerate(ring[:-1], 1):
        kill(4 * turn + 2, *words, *mode)
        assert newest(run) == 4 * turn
    ok(*words, *ring[-1])
    attempts, _ = read_journal(run / JOURNAL)
    assert [attempt.resumed for attempt in attempts] == [0, 4, 8, 12, 16]
    assert result(run)["steps"] == 22
    assert_ends_like(run, whole)


# --- in two processes: properties that the command line does not show.
RANKS = """
import json, os, sys
from pathlib import Path

import torch
from torch import nn

from tests.strategies import create_strategy
from tests.strategies import gathered
from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.modes import fsdp
from trainer.distributed.world_setup import create_world
from trainer.recipe import load

torch.manual_seed(0)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x.flatten(1))) + self.first.weight.sum()


class Kept(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.kept = [keep(self.layer.weight)]

    def forward(self, x):
        return nn.functional.linear(x.flatten(1), self.kept[0])


class Shrinking(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x.flatten(1))


class Loose(nn.Module):
    def __init__(self, loose):
        super().__init__()
        self.weight, self.loose = nn.Parameter(torch.zeros(3, 8)), nn.Parameter(loose)

    def forward(self, x):
        return nn.functional.linear(x.flatten(1), self.weight) + self.loose.sum().float()


refused = {
    "outside": Outside,
    "in a list": lambda: Kept(lambda weight: weight),
    "a view": lambda: Kept(lambda weight: weight.detach()[:]),
    "changed": lambda: Shrinking(8, 3),
    "scalar": lambda: Loose(torch.tensor(1.0)),
    "empty": lambda: Loose(torch.zeros(0, 3)),
    "two types": lambda: Loose(torch.zeros(3, dtype=torch.float64)),
    "hooked": lambda: hooked(),
    "hooked, by the proof": lambda: hooked(),
}


def hooked():
    made = model()
    # the last rank's
    made[3].weight.register_hook(lambda gradient: gradient * torch.tensor([[1.0], [1.0], [0.3]]))
    return made


class Viewed(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(-1, 2, 4)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Viewed(8, 8)

    def forward(self, x):
        y = self.block(self.first(x.flatten(1)))
        y += 1
        return y.flatten(1)


def in_place():
    torch.manual_seed(0)
    return InPlace()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def strategy(module, *words):
    recipe = load(None, "mode=fsdp", "devices=[cpu]", *words)
    made = create_strategy(recipe, world, (4, 2, 4), classes=3)
    made.setup(module)
    return made


world = create_world(load(None, "mode=fsdp", "devices=[cpu]"))
world.connect(60.0)
inputs, targets = torch.randn(8, 2, 4), torch.arange(8) % 3
rows = slice(4 * world.rank, 4 * world.rank + 4)
batch = Batch(inputs[rows], targets[rows], 4)
told = {}
for reshard, make in (("true", model), ("false", model), ("true", in_place)):
    plain, sharded = make(), strategy(make(), f"fsdp.reshard={reshard}")
    reshard = f"{reshard} {make.__name__}"
    parameters = sharded.named_parameters().items()
    told[f"rows {reshard}"] = {name: list(p.shape) for name, p in parameters}
    for _ in range(2):
        loss = sharded.forward_backward(batch, 1 / 8)
        sharded.reduce_gradients()
        reference = nn.functional.cross_entropy(plain(inputs), targets)
        reference.backward()
        whole = gathered(sharded, {name: p.grad for name, p in sharded.named_parameters().items()})
        unsharded = plain.named_parameters() if whole else ()
        apart = [(whole[name] - p.grad).abs().max().item() for name, p in unsharded]
        total = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        norm_apart = (sharded.grad_norm() - total).abs().item()
        told.setdefault(f"apart {reshard}", []).append([*apart, norm_apart])
        with torch.no_grad():
            for p in [*plain.parameters(), *sharded.named_parameters().values()]:
                p -= p.grad
                p.grad = None
told["refused"], told["tried"] = {}, [*refused]
for name, make in refused.items():
    if "proof" in name:  # nothing else is to see it
        fsdp.find_sharding_obstacle = lambda unit, name: None
    try:
        strategy(make()).forward_backward(batch, 1 / 8)
    except RecipeError as error:
        told["refused"][name] = str(error)
(Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(told))
world.close()
os._exit(0)  # to take all modules apart takes a second
"""


@pytest.mark.slow
def test_gathered_weights_are_freed_and_gradients_are_those_of_one_process(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    run_on_two_ranks(script, tmp_path, timeout=120)
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        for reshard in ("true model", "false model"):
            rows = report[f"rows {reshard}"]
            assert rows["1.weight"] == [8, 8] and rows["3.weight"] == [2 - rank, 16]
        for reshard in ("true model", "false model", "true in_place"):
            assert len(report[f"apart {reshard}"]) == 2
            assert max(map(max, report[f"apart {reshard}"])) < 1e-6
        assert [*report["refused"]] == [*report["tried"]], "it trains wrongly"
        assert "3.weight" in report["refused"]["hooked"]
        assert "gradient of 3.weight" in report["refused"]["hooked, by the proof"], (
            "which rank 1 alone can see"
        )
        assert all(
            "mode=ddp" in line and "model.name" in line for line in report["refused"].values()
        )


TORCHVISION = [f"{name}:{size}" for name, size in families.FAMILIES.values()]
TIMM = [f"timm:{name}:{size}" for name, size in families.TIMM.items()]


@pytest.mark.full("every family")
def test_a_family_in_shards_is_the_whole_model(tmp_path):
    """The comparison is in double precision: losses, which are stored in single, gradient norms of
    two steps, and outputs in evaluation.
    """
    cases = [*TORCHVISION, *(TIMM if importlib.util.find_spec("timm") else [])]
    run_on_two_ranks(
        PROJECT / "tests" / "modes" / "sharded_families.py", tmp_path, *cases, timeout=7200
    )
    report = json.loads((tmp_path / "families.json").read_text())
    assert {*report} == {case.rpartition(":")[0] for case in cases}
    apart = {
        name: message
        for name, message in report.items()
        if isinstance(message, str) or max(message) > 1e-6
    }
    assert apart == {}


# Ranks have different numbers of a matrix's rows. Some have none of its 2 rows.
NARROW = """
from torch import nn
from trainer import register_model

@register_model("narrow")
def build(num_classes, channels, image_size):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(8, 40),
        nn.Tanh(),
        nn.Linear(40, 2),
        nn.Linear(2, 40),
        nn.Tanh(),
        nn.Linear(40, num_classes),
    )
"""


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (3, []),
        pytest.param(4, ["fsdp.shards=2", "precision=fp16"], marks=pytest.mark.slow),
        pytest.param(5, ["model.freeze=2"], marks=pytest.mark.slow),
    ],
)
def test_muon_orthogonalizes_whole_matrices(processes, words, tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.chdir(tmp_path)
    common = ["recipe=digits", "model.name=narrow", "plugin=narrow", "batch_size=48", "max_steps=6"]
    common += ["optimizer.name=muon", "optimizer.lr=0.02", "optimizer.nesterov=true", "threads=1"]
    shared = [word for word in words if not word.startswith("fsdp.")]
    ok(*common, *shared, *QUIET, "mode=single", "output=single")
    ok(*common, *words, *QUIET, "mode=fsdp", f"nproc={processes}", "output=shards")
    expected = load_file("single/last.safetensors")
    found = load_file("shards/last.safetensors")
    for name, weight in expected.items():
        # The iteration is in bf16, which amplifies rounding.
        assert (found[name] - weight).norm() <= 2e-3 * weight.norm(), name

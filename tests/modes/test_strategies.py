"""The contract's parts that whole runs do not show: synchronised BatchNorm's numbers, names, unused parameters."""

import copy
import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.commands import environment
from tests.contexts import mode_of
from tests.worlds import on_ranks
from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.models import zoo
from trainer.models.partition import trace
from trainer.modes import STRATEGIES, sync_batchnorm
from trainer.modes.ddp import read_in_training
from trainer.modes.pipeline.wire import Wire
from trainer.modes.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from trainer.processes.rank import Place
from trainer.processes.world import World
from trainer.recipe import MODES, ModelRecipe, load

CPU = torch.device("cpu")
ALONE = World(Place(), CPU, 1, ("cpu",))
TWO = World(Place(), CPU, 1, ("cpu:0", "cpu:1"), (CPU, CPU))  # one process, two stand-ins


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batch_norms(monkeypatch, reduce, mean, std, affine):
    """Outputs, gradients and statistics of two ranks with half of a batch each, and of `nn.BatchNorm2d` on all of it.

    The latter in float64; the halves have unlike means, and the statistics are those of the last batch alone.
    """
    torch.manual_seed(0)
    data = torch.randn(8, 3, 4, 4) * std + mean
    data[4:] += std
    weights, own = torch.randn(8, 3, 4, 4), threading.local()
    monkeypatch.setattr(sync_batchnorm.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sync_batchnorm.dist, "all_reduce", lambda values: reduce(own.world, values))

    def normalised(layer, rows, dtype):
        inputs = data[rows].to(dtype).requires_grad_()
        for _ in range(2):
            out = layer(inputs)
        (out * weights[rows].to(dtype)).sum().backward()
        return {"out": out, "gradient": inputs.grad, "mean": layer.running_mean, "variance": layer.running_var}

    def rank(world):
        own.world = world
        layer = SyncBatchNorm(3, affine=affine, momentum=1.0)
        found = normalised(layer, slice(4 * world.rank, 4 * world.rank + 4), torch.float32)
        assert layer.num_batches_tracked == 2
        return found | {"eval": layer.eval()(data)}

    whole = nn.BatchNorm2d(3, affine=affine, momentum=1.0, dtype=torch.float64)
    expected = normalised(whole, slice(None), torch.float64) | {"eval": whole.eval()(data.double())}
    first, second = on_ranks(2, rank)
    ours = {name: torch.cat([first[name], second[name]]) for name in ("out", "gradient")}
    return {**first, **ours}, {name: value.float() for name, value in expected.items()}


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1000.0, 1e-2)])
@pytest.mark.parametrize("affine", [True, False])
def test_sync_batch_norm_over_two_ranks_is_batch_norm_of_the_whole_batch(monkeypatch, mean, std, affine):
    ours, theirs = batch_norms(monkeypatch, lambda world, values: world.sum_(values), mean, std, affine)
    # In float32 a mean of 1000 is known to 3e-5, which is 0.3 % of that deviation.
    loose = {} if mean == 0 else {"rtol": 1e-2, "atol": 1e-2}
    for name, expected in theirs.items():
        tolerance = {"rtol": 1e-3, "atol": 0.0} if name == "variance" else loose or {"rtol": 1e-4, "atol": 1e-5}
        if name == "gradient":
            tolerance["atol"] = 1e-2 * expected.abs().max().item() if loose else 1e-5
        torch.testing.assert_close(ours[name], expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_without_the_other_rank_sync_batch_norm_is_something_else(monkeypatch):
    ours, theirs = batch_norms(monkeypatch, lambda world, values: values.mul_(2), 0.0, 1.0, True)
    for name, expected in theirs.items():
        assert not torch.allclose(ours[name], expected, rtol=1e-2, atol=1e-2), name


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", ["vit_tiny", "cnn", "swin_t"])
def test_what_a_rank_sends_is_contiguous_wherever_the_cut(name, channels_last):
    """Activations, and gradients as zero-bubble schedules ask for them; gloo and NCCL refuse others."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    traced = trace(zoo.build(ModelRecipe(name=name), 10, 3, 32).to(memory_format=layout), name)
    stages = traced.stages(traced.cuts)
    travelling = torch.randn(2, 3, 32, 32).contiguous(memory_format=layout)
    for index, stage in enumerate(stages):
        first, last = index == 0, index == len(stages) - 1
        received = travelling.detach().requires_grad_()
        travelling = Wire(stage, lambda run, inputs: run(inputs), first, last)(received)
        assert travelling.is_contiguous() and not travelling._is_view()
        gradient = torch.autograd.grad(travelling.square().sum(), received)[0]
        assert first or gradient.is_contiguous(), traced.cuts[index - 1]


def test_converting_keeps_names():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False)))
    before = list(model.state_dict())
    convert_sync_batchnorm(model, CPU)
    assert list(model.state_dict()) == before
    assert [type(layer) for layer in model[1]] == [SyncBatchNorm, SyncBatchNorm]


def test_on_a_gpu_synchronised_layers_are_torchs():
    """Which take no part in what the CPU's do here."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False)))
    before = model.state_dict()
    found = convert_sync_batchnorm(model, torch.device("cuda"))
    assert [type(layer) for layer in found[1]] == [nn.SyncBatchNorm, nn.SyncBatchNorm]
    assert list(found.state_dict()) == list(before)


@pytest.mark.full("compiles in two ranks")
def test_a_gpus_synchronised_layers_can_be_compiled(tmp_path):
    """The compiler breaks its graph at them: their collectives stay as they are."""
    rank = [sys.executable, "-m", "tests.modes.synchronised", "{}", str(tmp_path / "store")]
    ranks = [[word.format(number) for word in rank] for number in (0, 1)]
    second = subprocess.Popen(ranks[1], env=environment(), stderr=subprocess.DEVNULL)
    try:
        first = subprocess.run(ranks[0], env=environment(), capture_output=True, text=True, timeout=120)
    finally:
        second.kill()
        second.wait()
    assert first.returncode == 0, first.stderr
    eager, compiled, graphs = json.loads(first.stdout.splitlines()[-1])
    assert compiled == pytest.approx(eager, rel=1e-4) and graphs > 2 and len({*eager}) == 4


def test_every_mode_of_the_schema_has_a_strategy():
    assert set(STRATEGIES) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_weight_times_summed_loss(mode):
    """The loss of a micro-batch is weight x sum, so that pieces of a batch add up to its mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    before = copy.deepcopy(model)
    recipe = load(None, f"mode={mode}", "pipeline.split_size=3")  # four rows: an uneven last micro-batch
    strategy = mode_of(recipe, TWO if recipe.traits.many_devices else ALONE, (4, 1, 2, 2), classes=3, samples=8)
    strategy.setup(model)
    inputs, targets = torch.randn(8, 1, 2, 2), torch.arange(8) % 3
    whole = strategy.forward_backward(Batch(inputs, targets, 8), 1 / 8)
    gradient = strategy.named_parameters()["1.weight"].grad.clone()
    for parameter in strategy.named_parameters().values():
        parameter.grad = None
    parts = [
        strategy.forward_backward(Batch(inputs[rows], targets[rows], 4), 1 / 8, sync=rows.start > 0)
        for rows in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(strategy.named_parameters()["1.weight"].grad, gradient)
    assert whole.item() == pytest.approx(nn.functional.cross_entropy(before(inputs), targets).item())
    strategy.train(False)
    torch.testing.assert_close(strategy.forward(inputs), before(inputs))
    assert list(strategy.named_parameters()) == [name for name, _ in before.named_parameters()]
    strategy.close()


class Half(nn.Module):
    """A model with a layer that no pass uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x.flatten(1))


def test_unused_parameters_under_ddp(group):
    pair = World(Place(0, 2, 0, 2, 0, True), CPU, 1, ("cpu:0", "cpu:1"))  # a second rank that is not needed here
    mode_of(load(None, "mode=ddp"), pair, (4, 1, 2, 2)).setup(Half())
    with pytest.raises(RecipeError, match="accumulate=1"):
        mode_of(load(None, "mode=ddp", "accumulate=2"), pair, (4, 1, 2, 2)).setup(Half())


@pytest.mark.filterwarnings("error::FutureWarning")
def test_ddp_is_set_up_without_a_warning_and_forward_passes_broadcast_what_they_read(group):
    pair = World(Place(0, 2, 0, 2, 0, True), CPU, 1, ("cpu:0", "cpu:1"))
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    for reads in (False, True):
        strategy = mode_of(load(None, "mode=ddp"), pair, (4, 1, 2, 2))
        strategy.setup(model)
        assert strategy.wrapped.forward_sync_buffers is reads
        model.register_buffer("scale", torch.ones(4))


def test_buffers_are_broadcast_only_where_a_training_step_reads_them():
    """Batch norm's running statistics are written in training, and read in evaluation: after `settle`."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert not read_in_training(model) and not read_in_training(nn.Linear(2, 2))
    assert not read_in_training(nn.SyncBatchNorm(4))
    model.register_buffer("scale", torch.ones(4))
    assert read_in_training(model)
    assert read_in_training(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))

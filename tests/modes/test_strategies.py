"""The contract's parts that whole runs do not show: synchronised BatchNorm's numbers, names, unused
parameters.
"""

import copy
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.modes.odd_models import Squashed
from tests.strategies import create_strategy, on_ranks
from trainer.data import Batch
from trainer.distributed.world import World
from trainer.errors import RecipeError
from trainer.models import zoo
from trainer.models.blocks import freeze
from trainer.models.norms import check_alone
from trainer.models.partition import trace
from trainer.modes import sync_batchnorm
from trainer.modes.base import Strategy
from trainer.modes.ddp import read_in_training
from trainer.modes.pipeline.ranks import Wire
from trainer.modes.sync_batchnorm import synchronise_batch_norm
from trainer.processes.rank import Place
from trainer.recipe import MODES, ModelRecipe, load

CPU = torch.device("cpu")
ALONE = World(Place(), CPU, 1, ("cpu",))
# One process with two stand-ins for devices.
TWO = World(Place(), CPU, 1, ("cpu:0", "cpu:1"), (CPU, CPU))
# A second rank that is not needed here.
PAIR = World(
    Place(0, 2, 0, 2, 0, True),
    CPU,
    1,
    ("cpu:0", "cpu:1"),
)
BATCH = Batch(
    torch.ones(4, 1, 2, 2),
    torch.tensor([0, 1, 2, 0]),
    4,
)


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks as threads: what a layer exchanges, by name and rank."""
    own = threading.local()
    exchanged = []

    def add(values):
        exchanged.append(values.shape)
        own.world.sum_(values)

    monkeypatch.setattr(sync_batchnorm.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sync_batchnorm.dist, "get_rank", lambda: own.world.rank)
    monkeypatch.setattr(sync_batchnorm.dist, "all_reduce", add)

    def together(work):
        def rank(world):
            own.world = world
            return work(world.rank)

        return on_ranks(2, rank), exchanged

    return together


def ddp(model, *words):
    """The model under mode=ddp as one of two ranks, in a process group of one."""
    strategy = create_strategy(
        load(None, "mode=ddp", *words),
        PAIR,
        (4, 1, 2, 2),
    )
    strategy.setup(model)
    return strategy


def normalised(layer, inputs, weights):
    """Outputs, gradients and statistics after two passes."""
    for _ in range(2):
        inputs = inputs.detach().requires_grad_()
        out = layer(inputs)
    (out.float() * weights).sum().backward()
    return {
        "out": out.detach(),
        "gradient": inputs.grad,
        **{name: p.grad for name, p in layer.named_parameters()},
        **dict(layer.named_buffers()),
    }


def synchronised(model):
    """Normalize over all ranks, and return the layers whose `forward` does so now."""
    synchronise_batch_norm(model)
    return [module for module in model.modules() if "forward" in vars(module)]


def layer_over_ranks(ranks, whole, data, weights):
    """Return the results of `normalised` on two ranks, the first with fewer samples, and on one
    rank with all samples.
    """
    layers = [copy.deepcopy(whole) for _ in range(2)]
    for layer in layers:
        assert synchronised(layer) == [layer] and type(layer) is type(whole)

    def rank(number):
        first = max(1, len(data) * 3 // 8)
        rows = slice(first, None) if number else slice(first)
        return normalised(layers[number], data[rows], weights[rows])

    (first, second), exchanged = ranks(rank)
    assert sorted(map(len, exchanged)) == [2, 2, 3, 3, 3, 3], (
        "one a pass and one backward, on two ranks"
    )
    ours = {name: torch.cat([first[name], second[name]]) for name in ("out", "gradient")}
    ours |= {name: first[name] + second[name] for name, _ in whole.named_parameters()}
    for name in dict(whole.named_buffers()):
        assert torch.equal(first[name], second[name]), name
        ours[name] = first[name]
    if data.dtype != torch.float32:
        whole = whole.double()
        data = data.double()
    return ours, normalised(whole, data, weights)


KINDS = {
    "plain": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 4)),
    "without weights": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4)),
    "without momentum": (lambda: nn.BatchNorm2d(3, momentum=None, eps=0.1), (8, 3, 4, 4)),
    "tracking nothing": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 4)),
    "a subclass": (lambda: Squashed(3), (8, 3, 4, 4)),
    "single rows": (lambda: nn.BatchNorm1d(3), (2, 3)),
    "one dimension": (lambda: nn.BatchNorm1d(3), (8, 3, 5)),
    "three dimensions": (lambda: nn.BatchNorm3d(3), (4, 3, 2, 2, 2)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", KINDS)
def test_sync_batch_norm_over_two_ranks_is_batch_norm_of_the_whole_batch(ranks, kind, layout):
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    whole = make()
    data = torch.randn(shape) * 2 + 3
    data[len(data) // 2 :] += 2
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    if layout is torch.channels_last and len(shape) == 4:
        data = data.contiguous(memory_format=layout)
    ours, reference = layer_over_ranks(ranks, whole, data, torch.randn(shape))
    assert ours["out"].stride() == reference["out"].stride()
    torch.testing.assert_close(
        ours, reference, rtol=1e-4, atol=1e-4 if kind == "single rows" else 2e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sync_batch_norm_in_half_precision(ranks, dtype):
    """Statistics are in single precision; what is rounded is rounded as the inputs are."""
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(3)
    data = (torch.randn(8, 3, 4, 4) * 2 + 3).to(dtype)
    ours, reference = layer_over_ranks(
        ranks,
        whole,
        data,
        torch.randn(8, 3, 4, 4),
    )
    assert ours["out"].dtype == ours["gradient"].dtype == dtype
    assert ours["running_var"].dtype == torch.float32
    step = torch.finfo(dtype).eps
    for name, expected in reference.items():
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-5}
            if name.startswith("running")
            else {"rtol": 8 * step, "atol": 8 * step}
        )
        torch.testing.assert_close(
            ours[name].double(),
            expected.double(),
            **tolerance,
            msg=lambda text, n=name: n + text,
        )


def test_sync_batch_norm_keeps_a_small_variance_with_a_large_mean(ranks):
    """A float32 mean of 1000 has an error of 3e-5, which is 0.3 % of that deviation."""
    torch.manual_seed(0)
    data = torch.randn(8, 3, 4, 4) * 1e-2 + 1000
    ours, _ = layer_over_ranks(
        ranks,
        nn.BatchNorm2d(3, momentum=1.0),
        data,
        torch.randn(8, 3, 4, 4),
    )
    torch.testing.assert_close(
        ours["running_var"],
        data.double().var([0, 2, 3]).float(),
        rtol=1e-3,
        atol=0.0,
    )


def test_evaluation_and_frozen_layers_exchange_nothing():
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
    )
    freeze(model, ["0", "1"], "model")
    inputs = torch.randn(2, 3, 4, 4)
    expected = model.eval()(inputs)
    assert synchronised(model) == [model[3]]
    assert torch.equal(model(inputs), expected)


def test_a_layer_that_would_see_one_ranks_rows_alone_is_refused_by_its_name():
    class Written(nn.BatchNorm2d):
        def forward(self, inputs):
            return inputs - inputs.mean([0, 2, 3], keepdim=True)

    fine = Squashed(3).double()
    assert synchronised(nn.Sequential(fine)) == [fine]
    with pytest.raises(
        RecipeError, match=r"^sync_bn=true: layer 1\.1 \(Written\) .*nn\.BatchNorm2d"
    ):
        synchronise_batch_norm(nn.Sequential(nn.Identity(), nn.Sequential(Squashed(3), Written(3))))


def test_layers_that_exchange_statistics_by_themselves_are_refused():
    class Own(nn.SyncBatchNorm):
        pass

    with pytest.raises(RecipeError, match=r"layer 0\.1 \(Own\) .*nn\.BatchNorm2d.*sync_bn=true"):
        check_alone(nn.Sequential(nn.Sequential(nn.Identity(), Own(3))))
    check_alone(nn.Sequential(nn.BatchNorm2d(3)))


def test_running_statistics_of_single_images_are_refused_where_only_rank_0_would_have_them():
    tracking, plain = (
        nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=tracks)) for tracks in (True, False)
    )
    for exchanges in ("gradients", "shards"):
        with pytest.raises(
            RecipeError, match=r"layer 0 \(InstanceNorm2d\).*track_running_stats=False"
        ):
            check_alone(tracking, exchanges)
        check_alone(plain, exchanges)
    check_alone(tracking, "weights")  # Only local_sgd averages these.


@pytest.mark.slow(cases=["swin_t-True", "swin_t-False"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", ["vit_tiny", "cnn", "swin_t"])
def test_sent_tensors_are_contiguous_at_every_cut(name, channels_last):
    """Activations, and gradients as zero-bubble schedules ask for them; gloo and NCCL refuse
    others.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    traced = trace(
        zoo.build(
            ModelRecipe(name=name),
            10,
            3,
            32,
        ).to(memory_format=layout),
        name,
    )
    stages = traced.stages(traced.cuts)
    travelling = torch.randn(2, 3, 32, 32).contiguous(memory_format=layout)
    for index, stage in enumerate(stages):
        first = index == 0
        last = index == len(stages) - 1
        received = travelling.detach().requires_grad_()
        travelling = Wire(stage, lambda run, inputs: run(inputs), first, last)(received)
        assert travelling.is_contiguous() and not travelling._is_view()
        gradient = torch.autograd.grad(travelling.square().sum(), received)[0]
        assert first or gradient.is_contiguous(), traced.cuts[index - 1]


@pytest.mark.parametrize("mode", MODES)
def test_weight_times_summed_loss(mode):
    """The loss of a micro-batch is weight x sum, so that micro-batches add up to the mean of the
    batch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )
    before = copy.deepcopy(model)
    # Four rows: an uneven last micro-batch.
    recipe = load(None, f"mode={mode}", "pipeline.split_size=3")
    strategy = create_strategy(
        recipe,
        TWO if recipe.traits.many_devices else ALONE,
        (4, 1, 2, 2),
        classes=3,
        samples=8,
    )
    strategy.setup(model)
    inputs = torch.randn(8, 1, 2, 2)
    targets = torch.arange(8) % 3
    whole = strategy.forward_backward(Batch(inputs, targets, 8), 1 / 8)
    gradient = strategy.named_parameters()["1.weight"].grad.clone()
    for parameter in strategy.named_parameters().values():
        parameter.grad = None
    parts = [
        strategy.forward_backward(
            Batch(inputs[rows], targets[rows], 4),
            1 / 8,
            sync=rows.start > 0,
        )
        for rows in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(strategy.named_parameters()["1.weight"].grad, gradient)
    assert whole.item() == pytest.approx(
        nn.functional.cross_entropy(before(inputs), targets).item()
    )
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_that_no_pass_uses_keeps_no_gradient_under_ddp(accumulate, group):
    """An optimizer leaves it alone then, as in `single`: no weight decay."""
    model = Half()
    strategy = ddp(model, f"accumulate={accumulate}")
    for micro in range(accumulate):
        strategy.forward_backward(BATCH, 0.25 / accumulate, sync=micro == accumulate - 1)
    assert model.used.weight.grad.any() and model.unused.weight.grad is None
    strategy.close()


class Sometimes(Half):
    """A model that drops one of its layers from some passes on."""

    drops = False

    def forward(self, x):
        return super().forward(x) + (0 if self.drops else self.unused(x.flatten(1)))


def test_a_layer_that_is_dropped_from_some_step_on_is_refused_under_ddp_in_that_step(group):
    model = Sometimes()
    strategy = ddp(model)
    strategy.forward_backward(BATCH, 0.25)
    model.drops = True
    with pytest.raises(RecipeError, match="mode=single"):
        strategy.forward_backward(BATCH, 0.25)  # The gradients are no averages.


class ByChance(Half):
    """A model that drops one of its layers in a third of all passes."""

    def forward(self, x):
        return super().forward(x) + (self.unused(x.flatten(1)) if torch.rand(()) > 1 / 3 else 0)


def test_layers_that_are_dropped_by_chance_train_under_ddp(group):
    model = ByChance()
    torch.manual_seed(1)  # the first passes use the layer, not all of `PROBE_PASSES`
    strategy = ddp(model)
    dropped = set()
    for _ in range(20):
        model.zero_grad()
        strategy.forward_backward(BATCH, 0.25)
        dropped.add(model.unused.weight.grad is None)
    assert dropped == {True, False}
    strategy.close()


class Recomputed(Half):
    """A model that computes its activations again in the backward pass."""

    def forward(self, x):
        return checkpoint(
            super().forward,
            x + self.used.bias.sum() * 0,
            use_reentrant=True,
        )


def test_a_reentrant_checkpoint_and_an_unused_layer_train_under_ddp_together(group):
    model = Recomputed()
    strategy = ddp(model)
    strategy.forward_backward(BATCH, 0.25)
    assert model.used.weight.grad.any()
    strategy.close()
    with pytest.raises(RecipeError, match="use_reentrant=False"):
        ddp(Recomputed(), "accumulate=2")


def test_finding_out_whether_parameters_are_unused_leaves_no_trace(group):
    """The search is skipped under accumulation, and dropout draws the same numbers afterwards."""
    states = []
    for accumulate in (1, 2):
        model = nn.Sequential(
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3),
            nn.Flatten(),
            nn.Dropout(),
        )
        torch.manual_seed(0)
        strategy = ddp(model, f"accumulate={accumulate}")
        states.append(torch.get_rng_state())
        assert all(
            parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
        )
        assert model[1].num_batches_tracked == 0 and not model[1].running_mean.any()
        strategy.close()
    assert torch.equal(*states)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_ddp_is_set_up_without_a_warning_and_forward_passes_broadcast_what_they_read(group):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
    )
    for reads in (False, True):
        # Newer versions of torch keep the older name, too.
        assert ddp(model).wrapped.broadcast_buffers is reads
        model.register_buffer("scale", torch.ones(4))


def test_ddp_is_gone_before_its_process_group(group):
    """The reducer of torch 2.11 may wait for ever for gloo's thread if it has the last reference to
    a group.
    """
    strategy = ddp(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    reducer = weakref.ref(strategy.wrapped.reducer)
    gc.disable()
    strategy.close()
    gc.enable()
    assert reducer() is None


def test_buffers_are_broadcast_only_where_a_training_step_reads_them():
    """Batch norm's running statistics are written in training, and read in evaluation: after
    `sync_weights`.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert not read_in_training(model) and not read_in_training(nn.Linear(2, 2))
    assert not read_in_training(nn.SyncBatchNorm(4))
    model.register_buffer("scale", torch.ones(4))
    assert read_in_training(model)
    assert read_in_training(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))


def test_buffers_of_a_type_go_in_one_message():
    """And their moving averages; of any layout."""

    def work(world):
        fill = 1.0 + world.rank
        buffers = {str(n): torch.full((n, 2), fill) for n in range(4)} | {
            "count": torch.tensor(world.rank)
        }
        buffers["image"] = torch.full((1, 3, 2, 2), fill).contiguous(
            memory_format=torch.channels_last
        )
        averages = {
            "3": torch.full((3, 2), 10 * fill),
            "weight": torch.tensor(fill),
        }
        left_out = torch.tensor(fill)  # Checkpoints do not contain it: persistent=False.
        module = SimpleNamespace(buffers=lambda: [*buffers.values(), left_out])
        strategy = SimpleNamespace(
            world=world, named_buffers=lambda: buffers, modules=lambda: [module]
        )
        Strategy.broadcast_buffers(strategy, averages)
        return world.sent, buffers | {"left out": left_out}, averages

    for rank, (sent, buffers, averages) in enumerate(on_ranks(2, work)):
        assert sent == 2 and buffers.pop("count") == 0
        assert all((values == 1).all() for values in buffers.values())
        assert (averages["3"] == 10).all() and averages["weight"] == 1 + rank, (
            "weights are no buffers"
        )

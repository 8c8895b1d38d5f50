"""Parts of the program that work on simulated devices, each as a function of the machine."""

import copy
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.strategies import context, create_strategy
from trainer.commands.plan import speed_probe
from trainer.commands.prove import prove_probe
from trainer.data import Batch
from trainer.data.photos.copies import Copies
from trainer.devices import health
from trainer.devices.cuda_graphs import StepRecorder, seconds_between
from trainer.devices.health import find_unfinished
from trainer.distributed.world import World
from trainer.models.balance import BlockCost, time_blocks
from trainer.models.partition import trace
from trainer.models.zoo import build
from trainer.modes import fsdp
from trainer.modes.pipeline import stages
from trainer.modes.pipeline.tuning import Plan
from trainer.optim.optimization import MovingAverage, Updater
from trainer.optim.optimizers import build_optimizer
from trainer.pool.transport import pack, pack_rows
from trainer.pool.worker import Caller
from trainer.processes.rank import Place
from trainer.recipe import ModelRecipe, load
from trainer.saving.checkpoint import Position
from trainer.saving.saver import Saver
from trainer.saving.tensor_files import Shard
from trainer.telemetry.clocks import Ledger, StepTimer, Stopwatch
from trainer.training import diagnosis, snapshots

CARD = torch.device("cuda", 0)


ROWS = 8


class Wrong(Exception):
    """An error on a simulated machine."""


def strategy_on(cards, words, model=None):
    drives = tuple(torch.device("cuda", card) for card in cards)
    world = World(
        Place(),
        drives[0],
        1,
        tuple(map(str, drives)),
        drives,
    )
    strategy = create_strategy(
        load({"batch_size": ROWS, "channels_last": False}, *words.split()),
        world,
        (ROWS, 1, 4, 4),
    )
    strategy.probe = lambda rows: [BlockCost(1.0, 2.0, 8)] * (len(strategy.traced.cuts) + 1)
    torch.manual_seed(0)
    strategy.setup(model or build(ModelRecipe(name="mlp"), 10, 1, 4))
    strategy.train()
    return strategy


def digits():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 1, 4, 4, generator=generator), torch.randint(
        10, (ROWS,), generator=generator
    )


def expect(fine):
    if not fine:
        raise Wrong("another result")


class Peers(World):
    """A world of two.

    The other rank is silent and takes two seconds for everything; an all-reduce is a kernel.
    """

    def sum_(self, values):
        return values.mul_(1)

    def max_(self, values):
        return values.fill_(2.0)

    def barrier(self):
        pass


PEERS = Peers(
    Place(0, 2, 0, 2),
    CARD,
    1,
    ("cuda:0", "cuda:1"),
)


class Mirrored(Peers):
    """A world of two whose other rank has the same values and does the same."""

    def sum_(self, values, along=None):
        return values.mul_(2)

    def max_(self, values):
        return values

    def broadcast_(self, values, along=None):
        return values

    def broadcast_object(self, value):
        return value

    def gather(self, value):
        return [value]


def pipelined(machine):
    """Two steps of the pipeline in one process, and an evaluation; the gradients are the whole
    model's.
    """
    torch.manual_seed(0)
    whole, (images, labels) = (
        build(
            ModelRecipe(name="mlp"),
            10,
            1,
            4,
        ),
        digits(),
    )
    loss = cross_entropy(whole(images), labels)
    loss.backward()
    for cards in ((0, 1), (0, 0), (0, 1, 2)):
        strategy = strategy_on(cards, "mode=pipeline pipeline.microbatches=4")
        optimizer = torch.optim.SGD(list(strategy.named_parameters().values()), lr=0.01)
        for step in range(2):
            got = strategy.forward_backward(
                Batch(
                    images.to(CARD),
                    labels.to(CARD),
                    ROWS,
                ),
                1 / ROWS,
            )
            if step == 0:
                expect(abs(got.item() - loss.item()) < 1e-5)
                for name, parameter in strategy.named_parameters().items():
                    expect(
                        torch.allclose(
                            parameter.grad.cpu(), whole.get_parameter(name).grad, atol=1e-5
                        )
                    )
            optimizer.step()
            optimizer.zero_grad()
        strategy.train(False)
        strategy.forward(images.to(CARD))
        expect(0 <= strategy.figures()["pipeline/bubble_pct"] <= 100)
        if machine.errors:
            return


def tried(machine):
    """A plan is tried."""
    strategy = strategy_on((0, 1), "mode=pipeline pipeline.microbatches=4")
    strategy.traced = trace(build(ModelRecipe(name="mlp"), 10, 1, 4), "mlp")
    with mock.patch.object(stages, "MAX_TRIAL_STEPS", 2):
        strategy.trial(Plan((strategy.traced.cuts[0],), 4, "streams"))


def timed(machine):
    """Use the timers of a run over an idle and a busy stream."""
    timer = StepTimer([CARD], 0)
    watch = Stopwatch(CARD)
    ledger = Ledger("other")
    ledger.devices = [CARD]
    for _ in range(70):
        timer.update()
        with watch:
            torch.ones(3, device=CARD)
        timer.step(0.0)
    expect(watch.seconds() > 0)
    with ledger.span("recording"), timer.pause():
        torch.ones(3, device=CARD)
    timer.update()
    torch.ones(3, device=CARD)
    timer.step(0.0)
    expect(timer.stop()[0] == 71)
    torch.ones(3, device=CARD)
    with ledger.span("evaluation"):
        torch.ones(3, device=CARD)


def costs(machine):
    time_blocks(
        trace(build(ModelRecipe(name="mlp"), 10, 1, 4), "mlp"),
        digits()[0].to(CARD),
        repeats=1,
    )


def sent(machine):
    """Results of a worker on their way to the parent."""
    x = torch.arange(6.0, device=CARD).view(2, 3)
    expect(np.frombuffer(pack({"x": x}).buffers[0], np.float32).tolist() == [0, 1, 2, 3, 4, 5])
    expect(pack_rows([x[0], x[1]]).buffers[0].values.sum().item() == 15)


def saved(machine):
    """Save weights to host memory, twice: the second save uses the buffers of the first."""
    saver = Saver(0, 1.0)
    for number in range(2):
        weight = torch.arange(6.0, device=CARD) + number
        copies = snapshots.on_host(
            saver,
            {"model": {"w": Shard(weight, weight.shape)}},
            [CARD],
        )
        expect(copies["model"]["w"].local.tolist() == [number + n for n in range(6)])


def broken(machine):
    # This process is no worker afterwards.
    with mock.patch("trainer.pool.worker._here", threading.local()):
        caller = Caller(lambda item: item, (), CARD)
        expect(caller.usable())
        machine.broken.add(0)
        expect(not caller.usable())


def communicated(machine):
    """Data parallel with and without its wrapper, and one exchange."""
    strategy = strategy_on((0,), "mode=ddp")
    strategy.wrapped = copy.deepcopy(strategy.module)
    strategy.world = PEERS
    strategy.wrapped._check_reducer_finalized = lambda: None  # The method belongs to DDP.
    strategy._exposed(1)
    strategy._exchanged(1.0)


def probed(machine):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
    with mock.patch.object(speed_probe, "PASS", 0.0):
        speed_probe._measure_whole(
            context(load(None, "mode=single"), PEERS, (2, 1, 4, 4)),
            model,
            2,
        )
        torch.ones(3, device=CARD)
        speed_probe._exchange(PEERS, CARD, reduce=True)


def held(machine):
    """A step issued to a card that is held, as a run's end does it: weights and buffers stay."""
    strategy = strategy_on(
        (0,),
        "mode=single ema=0.9",
        build(ModelRecipe(name="cnn"), 10, 1, 4),
    )
    state = SimpleNamespace(
        position=Position(1, 0, 1), average=MovingAverage(strategy.named_parameters(), 0.9)
    )
    optimizer = build_optimizer(strategy.named_parameters(), strategy.recipe.optimizer)
    state.updater = Updater(optimizer, strategy.recipe, CARD, None)
    state.strategy = strategy
    before = {name: tensor.clone() for name, tensor in strategy.module.state_dict().items()}
    expect(min(diagnosis._measure_device_seconds(state, 1 / ROWS, 1.0, 0.5, 0.1, 9.0)) > 0)
    expect(
        all(
            torch.equal(tensor, before[name])
            for name, tensor in strategy.module.state_dict().items()
        )
    )
    expect(diagnosis._measure_device_seconds(state, 1 / ROWS, 1.0, 0.5, 0.1, 1.9) is None)


def copied(machine):
    """Copy batches during computation, two at a time; their memory is reused as soon as nobody
    refers to it.
    """
    copies = Copies(CARD)
    following = copies.begin(torch.zeros(4))
    results = []
    for step in range(4):
        now = following
        following = copies.begin(torch.full((4,), step + 1.0))
        batch = now()
        results.append(batch + 1)
        del batch, now
    expect(torch.stack(results).tolist() == [[step + 1.0] * 4 for step in range(4)])


def proved(machine):
    """Time the operations of `prove` in one of two processes; the other one answers at once."""
    answers = {
        "send": lambda *_: None,
        "recv": lambda there, _: there.fill_(1),
        "all_reduce": lambda there: there.mul_(1),
    }
    here = prove_probe.Measurer(["cuda:0", "cuda:1"], 1, CARD)
    with mock.patch.multiple(
        dist,
        barrier=lambda: None,
        broadcast=lambda *_: None,
        **answers,
    ):
        torch.ones(3, device=CARD)
        here.seconds(lambda: torch.ones(3, device=CARD))
        prove_probe.links(here)
        before = torch.backends.cudnn.benchmark
        step = {"step_of": lambda *_: lambda *_: torch.ones(3, device=CARD), "SECONDS": 0.0}
        with mock.patch.multiple(prove_probe, **step):
            prove_probe.bare(here, 1)
        torch.backends.cudnn.benchmark = before


class Unused(nn.Module):
    """A block goes into the loss of every other pass only. In the others its weights are gathered
    for the backward pass last, and nothing uses them.
    """

    def __init__(self):
        super().__init__()
        self.passes = 0
        self.first, self.unused, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = x.flatten(1)
        extra = self.unused(x)
        x = self.first(x)
        self.passes += 1
        return self.last(x + extra if self.passes % 2 else x)


def steps_of_shards(offload, home):
    """Return weights and norms of two steps, each with an evaluation of averages without a wait."""
    images, labels = digits()
    recipe = load(None, "mode=fsdp", f"fsdp.offload={offload}", "optimizer.name=adamw")
    world = Mirrored(
        Place(0, 2, 0, 2),
        CARD,
        1,
        ("cuda:0", "cuda:1"),
    )
    strategy = create_strategy(recipe, world, (ROWS, 1, 4, 4))
    torch.manual_seed(0)
    strategy.setup(Unused())
    parameters = strategy.named_parameters()
    optimizer = build_optimizer(parameters, recipe.optimizer)
    norms = []
    updater = Updater(optimizer, recipe, home or strategy.gradient_device, None)
    for _ in range(2):
        strategy.train()
        strategy.module.passes = 0
        for sync in (False, True):
            batch = Batch(images.to(CARD), labels.to(CARD), ROWS)
            loss = strategy.forward_backward(batch, 1 / ROWS, sync)
        strategy.reduce_gradients()
        norms.append(updater.step(loss, strategy, want_norm=True).item())
        optimizer.zero_grad()
        averages = {name: p.detach() * 0.9 for name, p in parameters.items()}
        with strategy.weights(averages):
            strategy.train(False)
            strategy.forward(images.to(CARD))
    expect({p.device.type for p in parameters.values()} == {"cpu" if offload else "cuda"})
    return {name: p.detach().cpu() for name, p in parameters.items()}, norms


def own_rows(scatter, output_tensor, input_tensor, **_):
    """Replace a reduce-scatter, which does nothing in the fake group of some versions of torch."""
    output_tensor.copy_(input_tensor.chunk(2)[0])


def sharded(machine, home=None):
    """Shards, gradients and optimizer on the host do what they do on the card."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    # The expected shards are summed over ranks, but there is only one.
    unproven = {"observe_whole": lambda *_: None, "check_sharded": lambda *_: None}
    scattered = mock.patch.object(_fsdp_collectives.DefaultReduceScatter, "__call__", own_rows)
    try:
        with scattered, mock.patch.multiple(fsdp, **unproven):
            (host, norms), (card, reference) = (
                steps_of_shards(offload, home) for offload in (True, False)
            )
    finally:
        dist.destroy_process_group()
    expect(np.allclose(norms, reference) and all(norms))
    expect(all(torch.allclose(host[name], card[name]) for name in card))


def hung(machine):
    """Use a card that does not finish its work, and one that has."""
    torch.ones(3, device=CARD)
    machine.order.hung.add(1)
    other = torch.ones(3, device="cuda:1").device
    expect(find_unfinished([CARD, other], 0.01) == other)
    machine.order.hung.clear()
    expect(find_unfinished([CARD, other], 10.0) is None)


def compared(machine):
    """Measure how fast a card is compared with others."""
    # A sum is a kernel like a product, and 100 times as fast on the CPU that simulates the card.
    with mock.patch.object(torch, "mm", torch.add):
        expect(health.measure_speed(CARD) > 0)


def recorded(machine):
    """Use work on another stream, captured work between eager work, and the measured time."""
    recorder = StepRecorder(CARD)
    x = torch.zeros(3, device=CARD)
    x.add_(1)
    with recorder.use_side_stream():
        y = x * 2
    y.add_(1)
    replay, total = recorder.record(lambda: x.mul_(2).sum())
    begun = recorder.record_event()
    replay()
    expect(seconds_between(begun, recorder.record_event()) >= 0 and total.item() == 6)
    replay()
    recorder.close()

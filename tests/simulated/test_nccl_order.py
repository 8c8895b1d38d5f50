"""Point-to-point messages of all pipelines, and collectives of all modes: their order lets no GPU
wait for ever.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.command_line import QUIET, trainer
from tests.simulated.call_recorder import read
from tests.simulated.nccl_order import Call, on_ranks, stuck
from tests.strategies import create_strategy, gathered
from trainer.data import Batch
from trainer.errors import RecipeError
from trainer.modes import find_strategy_class
from trainer.modes.pipeline import stages
from trainer.modes.pipeline.torch_schedules import assign_recipe_ranks
from trainer.modes.pipeline.tuning import Plan
from trainer.recipe import load
from trainer.recipe.checks import microbatch_counts
from trainer.versions import torch_has

KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
KINDS += [
    (name, n) for name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble") for n in (2, 3)
]
LOOPED = [kind for kind in KINDS if kind[1] > 1 and kind[0] not in ("zbv", "dualpipev")]


def recipe(schedule, ranks, virtual, microbatches, replicas=1):
    rows = microbatches * replicas
    words = [
        f"pipeline.schedule={schedule}",
        f"pipeline.stages={ranks}",
        f"pipeline.virtual_stages={virtual}",
    ]
    return load(
        None,
        "mode=pipeline",
        "model.name=mlp",
        *words,
        "pipeline.split_size=1",
        f"batch_size={rows}",
    )


def counts(schedule, ranks, virtual, wanted=range(1, 33)):
    """Return the requested numbers of micro-batches that torch accepts."""
    for m in wanted:
        try:
            microbatch_counts(recipe(schedule, ranks, virtual, m), ranks)
        except RecipeError:
            continue
        yield m


def model(blocks):
    torch.manual_seed(0)
    layers = (layer for _ in range(blocks - 1) for layer in (nn.Linear(4, 4), nn.Tanh()))
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 3))


def images(rows):
    return torch.arange(rows * 4.0).view(rows, 1, 2, 2) / rows


def a_run(wanted, world, whole, rows):
    """Exchange everything that the ranks of a pipeline exchange in a run: tune, train, log figures,
    evaluate, save, and then all again.
    """
    shard = find_strategy_class(wanted, world).data_share(wanted, world)
    own = slice(
        shard.index * rows // shard.count,
        (shard.index + 1) * rows // shard.count,
    )
    batch = Batch(
        images(rows)[own],
        (torch.arange(rows) % 3)[own],
        rows // shard.count,
    )
    strategy = create_strategy(wanted, world, batch.inputs.shape, classes=3)
    strategy.setup(copy.deepcopy(whole))
    for _ in range(2):
        strategy.train()
        strategy.forward_backward(batch, 1 / rows)
        strategy.reduce_gradients()
        strategy.reduce_overflow(torch.zeros(1))
        strategy.grad_norm()
        strategy.figures()
        strategy.timeline()
        strategy.sync_weights({})
        strategy.train(False)
        outputs = [strategy.forward(batch.inputs) for _ in range(2)]
        whole = gathered(strategy, strategy.named_parameters())
    return strategy, outputs[-1], whole


def check_a_run(schedule, ranks, virtual, m, replicas=1):
    expected = recipe(schedule, ranks, virtual, m, replicas)
    whole = model(ranks * virtual)
    size = ranks * replicas
    rows = m * replicas
    actual, notes = on_ranks(size, lambda world: a_run(expected, world, whole, rows))
    assert stuck(notes) is None, (schedule, ranks, virtual, m)
    logits = torch.cat([outputs for _, outputs, _ in actual if outputs is not None])
    torch.testing.assert_close(logits, whole.eval()(images(rows)).detach())
    assert set(actual[0][2]) == {name for name, _ in whole.named_parameters()}
    return notes


@pytest.mark.slow(cases=["zbv-8-2-8", "dualpipev-4-2-9"])
@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "m"),
    [
        ("gpipe", 4, 1, 3),
        ("1f1b", 2, 1, 5),
        ("1f1b", 4, 1, 8),
        ("interleaved1f1b", 2, 2, 6),
        ("interleaved1f1b", 4, 3, 8),
        ("loopedbfs", 2, 3, 7),
        ("interleavedzerobubble", 4, 2, 8),
        ("zbv", 2, 2, 4),
        ("dualpipev", 4, 2, 9),
        ("zbv", 8, 2, 8),
    ],
)
def test_a_run_of_a_pipeline_needs_no_buffers(schedule, ranks, virtual, m):
    check_a_run(schedule, ranks, virtual, m)


def test_replicas_of_a_pipeline_need_no_buffers():
    """Each pair of ranks shares the world's communicator, and that of a pipeline or that of the
    copies of a stage.
    """
    notes = check_a_run("interleaved1f1b", 2, 2, 4, replicas=2)
    groups = [ranks for ranks, _ in sorted({(call.ranks, call.group) for call in calls_in(notes)})]
    ways = 1 + torch_has("gradients through a group of their own")
    assert groups == sorted(
        [
            (0, 1, 2, 3),
            *ways * [(0, 1), (2, 3)],
            (0, 2),
            (1, 3),
        ]
    )


def calls_in(queues):
    return [call for entries in queues for entry in entries for call in entry]


@pytest.mark.skipif(
    not torch_has("gradients through a group of their own"),
    reason="this torch has one for both ways",
)
@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_gradients_go_back_through_a_communicator_of_their_own(schedule, virtual):
    """NCCL does what one is given in order: an activation would queue behind a gradient."""
    m = max(counts(schedule, 2, virtual, range(1, 9)))
    expected = recipe(schedule, 2, virtual, m)
    whole = model(2 * virtual)
    actual, notes = on_ranks(2, lambda world: a_run(expected, world, whole, m))
    kept = assign_recipe_ranks(expected, 2)
    ways = sum(here != there for here, there in pairwise(kept))
    back = [
        call.kind for call in calls_in(notes) if call.group == actual[0][0].back_group.group_name
    ]
    # The calls of two steps.
    assert back.count("send") == back.count("recv") == len(back) / 2 == 2 * m * ways


@pytest.mark.full("every schedule, 2 to 8 ranks, 1 to 32 micro-batches")
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_runs_of_all_pipelines_need_no_buffers(schedule, virtual, ranks):
    for m in counts(
        schedule,
        ranks,
        virtual,
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32),
    ):
        check_a_run(schedule, ranks, virtual, m)


@pytest.mark.parametrize("replicas", [1, 2])
def test_tuning_needs_no_buffers(monkeypatch, replicas):
    """The ranks run probes, trials in two orders, and change the cuts, with the times of rank 0."""
    monkeypatch.setattr(stages, "MAX_TRIAL_STEPS", 2)
    whole = model(6)
    rows = 16 * replicas
    expected = load(
        None, "mode=pipeline", "model.name=mlp", "pipeline.stages=2", f"batch_size={rows}"
    )
    actual, notes = on_ranks(2 * replicas, lambda world: a_run(expected, world, whole, rows))
    assert stuck(notes) is None
    assert len({strategy.plan for strategy, _, _ in actual}) == 1


def evaluation(schedule, ranks, virtual, m, waves=True):
    """Return the calls of each rank in one batch of evaluation: `ProcessPipeline.forward` itself on
    stages that do nothing.
    """
    expected = recipe(schedule, ranks, virtual, m)

    def run(world):
        strategy = create_strategy(expected, world, (m, 4))
        strategy.plan = Plan(("",) * (ranks * virtual - 1), m, schedule)
        strategy.pipe_group = None
        strategy.assign_stages(strategy.plan)
        strategy.stages = {stage: nn.Identity() for stage in strategy.local_stages}
        strategy._evaluated_inputs = {stage: torch.zeros(1, 4) for stage in strategy.local_stages}
        strategy.ranks = ranks if waves else m + 1  # All micro-batches form one wave.
        return strategy.forward(images(m).flatten(1))

    actual, notes = on_ranks(ranks, run)
    assert next(out for out in actual if out is not None).equal(images(m).flatten(1))
    return notes


@pytest.mark.slow
def test_evaluation_needs_no_buffers(full):
    for schedule, virtual in KINDS:
        for ranks, sample in ((2, (1, 2, 3, 8)), (4, (1, 4, 7)), (8, (16,))):
            for m in counts(schedule, ranks, virtual, range(1, 33) if full else sample):
                assert stuck(evaluation(schedule, ranks, virtual, m)) is None, (
                    schedule,
                    virtual,
                    ranks,
                    m,
                )


@pytest.mark.parametrize(("schedule", "virtual"), LOOPED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluation_without_waves_would_wait_for_ever(schedule, virtual, ranks):
    waiting = stuck(evaluation(schedule, ranks, virtual, 8, waves=False))
    assert waiting is not None and {call.kind for call in waiting} == {"send"}


def test_any_two_calls_of_a_rank_in_the_other_order_are_noticed():
    """Parts of one kind in a batch stay together: two sends of one size are equal."""
    notes = check_a_run("1f1b", 2, 1, 3)
    for rank, entries in enumerate(notes):
        for place in range(len(entries) - 1):
            here = entries[place]
            there = entries[place + 1]
            if set(here) & set(there):
                continue
            swapped = [list(queue) for queue in notes]
            swapped[rank][place : place + 2] = there, here
            assert stuck(swapped) is not None, (rank, here, there)


def test_drawn_by_hand():
    def send(peer, what=1):
        return Call("send", peer, (0, 1), what)

    def receive(peer, what=1):
        return Call("recv", peer, (0, 1), what)

    def all_of(kind, *ranks):
        return Call(kind, -1, ranks)

    assert stuck([[], []]) is None
    assert stuck([[[send(1)], [receive(1)]], [[send(0)], [receive(0)]]]) == [send(1), send(0)]
    assert stuck([[[send(1)], [receive(1)]], [[receive(0)], [send(0)]]]) is None
    assert stuck([[[send(1), receive(1)]], [[send(0), receive(0)]]]) is None  # Each is a batch.
    assert stuck([[[send(1, 2)]], [[receive(0, 1)]]]) is not None  # The sizes differ.
    # Another communicator.
    assert stuck([[[send(1)]], [[Call("recv", 0, (0, 1, 2), 1)]]]) is not None
    assert (
        stuck([[[all_of("a", 0, 1)], [send(1)]], [[receive(0)], [all_of("a", 0, 1)]]]) is not None
    )
    both = [
        [all_of("a", 0, 1)],
        [all_of("b", 0, 1)],
    ]
    assert stuck([both, both]) is None
    assert stuck([both, both[::-1]]) is not None
    pairs = [
        [all_of("a", 0, 1)],
        [all_of("a", 0, 2)],
    ]
    assert stuck([pairs, pairs[:1], pairs[1:]]) is None
    ring = [
        [[all_of("a", 0, 1)], [all_of("a", 0, 2)]],
        [[all_of("a", 1, 2)], [all_of("a", 0, 1)]],
    ]
    # Three communicators in a circle.
    assert stuck([*ring, [[all_of("a", 0, 2)], [all_of("a", 1, 2)]]]) is not None
    assert stuck([[[all_of("a", 0, 1)]], []]) == [all_of("a", 0, 1), Call("nothing", -1, ())]


# Collectives of whole runs over gloo, by torch's hooks: `World`'s, the modes' own, DDP's from its
# reducer.

WHOLE = ["recipe=digits", "plugin=tests.simulated.call_recorder", "model.name=cnn", "epochs=2"]
WHOLE += ["save.every_steps=2", "optimizer.lr=0.001", *QUIET]
ALL_ON = ["precision=fp16", "ema=0.9", "clip_grad_norm=1", "accumulate=2"]
PIPE = ["mode=pipeline", "pipeline.stages=2", "pipeline.timeline=true"]


def calls(run, size, *words, rows=48, code=0, **env):
    """Run it, and what each rank asked of its communicators."""
    folder = Path(tempfile.mkdtemp(dir=run.parent))
    words = [*WHOLE, *words, f"nproc={size}", f"batch_size={rows}", "max_steps=4", f"output={run}"]
    completed = trainer(*words, env={"TRAINER_TEST_CALLS": str(folder), **env})
    assert completed.returncode == code, completed.stdout + completed.stderr
    return read(folder, size)


many = pytest.mark.full("one of several alike")
recorded = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has no hooks on groups"
)


@pytest.mark.slow
@recorded
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ["mode=ddp", "sync_bn=true", *ALL_ON]),
        pytest.param(3, ["mode=local_sgd", "local_sgd.every=2", *ALL_ON], marks=many),
        pytest.param(3, ["mode=hogwild", "ema=0.9"], marks=many),
        pytest.param(
            4,
            [*PIPE, *ALL_ON, "pipeline.schedule=interleaved1f1b", "pipeline.microbatches=4"],
            marks=many,
        ),
        pytest.param(2, [*PIPE, "pipeline.schedule=zbv", "pipeline.microbatches=4"], marks=many),
    ],
    ids=lambda words: " ".join(words[:3]) if isinstance(words, list) else None,
)
def test_all_ranks_of_a_run_call_in_one_order(size, words, tmp_path):
    """The run trains, evaluates, saves and diagnoses; a second run resumes from the middle."""
    first = calls(tmp_path / "run", size, *words)
    assert stuck(first) is None and all(len(queue) > 20 for queue in first)
    if size > 2:
        # The run looks as if it was killed after step 3.
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
        assert stuck(calls(tmp_path / "run", size, *words, "resume=auto")) is None


def ended(queues, rank):
    """Whether ranks wait for what this one did not do any more, and all of its own calls were
    answered.
    """
    waiting = stuck(queues)
    return (
        waiting is not None
        and waiting[rank].kind == "nothing"
        and sum(c.kind != "nothing" for c in waiting) > 0
    )


@recorded
@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"TRAINER_TEST_STOP": "1:50"}, 143),
        pytest.param({"TRAINER_FAULT": "nan@0:3"}, 5, marks=many),
        pytest.param({"TRAINER_FAULT": "oom@1:3"}, 6, marks=many),
    ],
    ids=["signal", "not finite", "out of memory"],
)
@pytest.mark.parametrize(
    "words", [["mode=ddp"], pytest.param([*PIPE, "pipeline.microbatches=4"], marks=many)]
)
def test_failures_of_one_rank_block_no_other(env, code, words, tmp_path):
    """A signal to one rank and a gradient that is not finite on one end all alike; out of memory
    ends one.
    """
    queues = calls(tmp_path / "run", 2, *words, code=code, **env)
    assert ended(queues, 1) if code == 6 else stuck(queues) is None

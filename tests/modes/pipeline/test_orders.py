"""Drawings of the order in which the stages of a pipeline work: a row per stage, a column per
second; a forward pass takes one second, a backward pass two.

Digits are forward passes of micro-batches and letters their backward passes: "0" and "aa" are the
first micro-batch's.
"""

import random
import re

import pytest

from trainer.modes.pipeline.orders import (
    Action,
    Span,
    as_ready,
    compute_ideal_bubble,
    compute_idle_share,
    compute_issue_order,
    gpipe,
    one_forward_one_backward,
    simulate,
)
from trainer.modes.pipeline.timeline import format_title
from trainer.modes.pipeline.torch_schedules import list_actions

LETTERS = {"F": "0123456789", "B": "abcdefghij", "I": "ABCDEFGHIJ", "W": "zyxwvutsrq"}
KINDS = {letter: (kind, m) for kind, letters in LETTERS.items() for m, letter in enumerate(letters)}
COST = (1.0, 2.0)


def order(text, stage):
    """A stage's actions: 0 is F of the first micro-batch, a its B, A its I, z its W."""
    return [
        Action(
            KINDS[letter][0],
            stage,
            KINDS[letter][1],
        )
        for letter in text
    ]


def written(actions):
    return "".join(LETTERS[action.kind][action.microbatch] for action in actions)


def draw(spans):
    rows = [
        ["."] * int(max(span.end for span in spans))
        for _ in range(1 + max(span.worker for span in spans))
    ]
    for worker, action, begin, end, _ in spans:
        for second in range(int(begin), int(end)):
            assert rows[worker][second] == ".", "two actions at once"
            rows[worker][second] = LETTERS[action.kind][action.microbatch]
    return "\n".join("".join(row) for row in rows)


def table(text):
    return "\n".join(text.split())


def run(kind, stages, microbatches):
    return simulate([kind(stage, stages, microbatches) for stage in range(stages)], [COST] * stages)


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "orders"),
    [
        (gpipe, 3, 3, ["012abc"] * 3),
        (one_forward_one_backward, 1, 3, ["0a1b2c"]),
        (one_forward_one_backward, 3, 5, ["012a3b4cde", "01a2b3c4de", "0a1b2c3d4e"]),
        (
            one_forward_one_backward,
            3,
            2,
            ["01ab", "01ab", "0a1b"],
        ),  # fewer micro-batches than stages
        (one_forward_one_backward, 3, 1, ["0a"] * 3),
    ],
)
def test_orders(kind, stages, microbatches, orders):
    assert [written(kind(stage, stages, microbatches)) for stage in range(stages)] == orders


FIRST_ALL_FORWARD = """
    0123......aabbccdd
    .0123...aabbccdd..
    ..0123aabbccdd....
"""
IN_TURN = """
    012....aa3bb.cc.dd
    .01..aa2bb3cc.dd..
    ..0aa1bb2cc3dd....
"""


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "drawn"),
    [
        (gpipe, 1, 2, "01aabb"),
        (one_forward_one_backward, 1, 2, "0aa1bb"),
        (gpipe, 3, 4, FIRST_ALL_FORWARD),
        (one_forward_one_backward, 3, 4, IN_TURN),
    ],
)
def test_who_works_when(kind, stages, microbatches, drawn):
    assert draw(run(kind, stages, microbatches)) == table(drawn)


def test_gradients_of_inputs_and_weights_cost_half_a_backward_each():
    """Step I lets the previous stage continue; no other worker waits for W."""
    spans = simulate([order("01AzBy", 0), order("0A1zBy", 1)], [COST] * 2)
    assert draw(spans) == table(
        """
        01.Az.By
        .0A1zBy.
        """
    )
    assert draw(simulate([order("0Az", 0)], [(1.0, 6.0)])) == "0AAAzzz"


def test_a_transfer_delays_only_between_workers():
    apart = [order("01ab", 0), order("0a1b", 1)]
    assert draw(simulate(apart, [COST] * 2, transfer=1)) == table(
        """
        01....aa.bb
        ..0aa1bb...
        """
    )
    one_worker = [order("01", 0) + order("01ab", 1) + order("ab", 0)]
    assert draw(simulate(one_worker, [COST] * 2, transfer=5)) == "0101aabbaabb"


def test_two_stages_a_worker():
    """The stages go round over two workers, or form a V, with the stages 1 and 2 as neighbors on
    one worker.
    """
    forward = [order("01", 0) + order("01", 2), order("01", 1) + order("01", 3)]
    assert draw(simulate(forward, [COST] * 4)) == table(
        """
        0101.
        .0101
        """
    )
    v = [
        order("0", 0) + order("0a", 3) + order("a", 0),
        order("0", 1) + order("0a", 2) + order("a", 1),
    ]
    assert draw(simulate(v, [COST] * 4, transfer=1)) == table(
        """
        0....0aa......aa
        ..00.....aaaa...
        """
    )


@pytest.mark.parametrize(
    "orders",
    [
        [order("a0", 0)],  # backward before forward
        [
            order("0ab", 0) + order("1", 0),
            order("01ab", 1),
        ],  # stage 0 wants B of a micro-batch that it has not sent
        [order("z0A", 0)],
        [order("0a", 1)],  # nobody works as stage 0
    ],
)
def test_orders_that_wait_in_a_circle(orders):
    with pytest.raises(ValueError, match="wait"):
        simulate(orders, [COST] * 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 21])
def test_issued_work_never_waits_for_later_work(stages, microbatches):
    issued = compute_issue_order(stages, microbatches)
    place = {action: index for index, action in enumerate(issued)}
    assert len(place) == len(issued) == 2 * stages * microbatches
    for kind, stage, m in issued:
        here = place[Action(kind, stage, m)]
        if kind == "F":
            assert stage == 0 or place["F", stage - 1, m] < here
        else:
            assert place["F", stage, m] < here
            assert stage == stages - 1 or place["B", stage + 1, m] < here
    for stage in range(stages):
        own = [action for action in issued if action.stage == stage]
        assert own == one_forward_one_backward(stage, stages, microbatches)


@pytest.mark.parametrize("kind", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 4), (2, 1), (2, 3), (3, 4), (4, 4), (4, 16), (8, 9)]
)
def test_equal_stages_have_the_ideal_bubble(kind, stages, microbatches):
    assert compute_idle_share(run(kind, stages, microbatches), stages) == pytest.approx(
        compute_ideal_bubble(stages, microbatches, 1)
    )


def test_the_idle_time_that_launching_may_hide_is_a_maximum():
    spans = [
        Span(
            0,
            Action("F", 0, 0),
            0.0,
            1.0,
            0.5,
        ),
        Span(
            1,
            Action("F", 1, 0),
            1.0,
            2.0,
            0.1,
        ),
    ]
    assert (
        compute_idle_share(spans, 2),
        compute_idle_share(spans, 2, launching=True),
    ) == pytest.approx((0.5, 0.65))
    assert re.findall(r"\d+%", format_title(spans, 2)) == ["50%", "65%"]
    without_launching = [span._replace(launching=0.0) for span in spans]
    assert re.findall(r"\d+%", format_title(without_launching, 2)) == ["50%"]


def test_idle_share():
    def span(worker, begin, end):
        return Span(worker, Action("F", worker, 0), begin, end)

    assert compute_idle_share([], 2) == 0
    assert compute_idle_share([span(0, 5, 5)], 1) == 0
    assert compute_idle_share([span(0, 5, 9)], 1) == 0
    # The times count from the first start, not from zero.
    assert compute_idle_share([span(0, 5, 7), span(1, 7, 9)], 2) == 0.5
    assert compute_idle_share([span(0, 0, 4), span(1, 1, 4)], 2) == pytest.approx(1 / 8)
    assert compute_idle_share([span(0, 0, 4)], 2) == 0.5  # a worker that did nothing at all


def test_ready_work_is_done_at_once_forward_passes_first():
    """Two stages on each of two workers, which wait for the first forward and the last backward
    pass alone.
    """
    listed = as_ready(
        [0, 1, 0, 1],
        [(1.0, 2.0)] * 4,
        2,
    )
    assert [
        [(action.kind, action.stage, action.microbatch) for action in worker] for worker in listed
    ] == [
        [
            ("F", 0, 0),
            ("F", 0, 1),
            ("F", 2, 0),
            ("F", 2, 1),
            ("B", 2, 0),
            ("B", 2, 1),
            ("B", 0, 0),
            ("B", 0, 1),
        ],
        [
            ("F", 1, 0),
            ("F", 1, 1),
            ("F", 3, 0),
            ("F", 3, 1),
            ("B", 3, 0),
            ("B", 3, 1),
            ("B", 1, 0),
            ("B", 1, 1),
        ],
    ]
    assert draw(simulate(listed, [COST] * 4)) == table("0101...aabbaabb .0101aabbaabb..")


@pytest.mark.parametrize("seed", range(20))
def test_an_order_of_ready_work_is_complete_and_sorted(seed):
    dice = random.Random(seed)
    workers = dice.choice([2, 3, 4])
    virtual = dice.choice([1, 2, 3])
    microbatches = dice.randint(1, 9)
    holders = list(range(workers)) * virtual
    stages = [(dice.uniform(0.5, 2), dice.uniform(0.5, 4)) for _ in holders]
    listed = as_ready(holders, stages, microbatches)
    spans = simulate(listed, stages)  # no circle
    assert len({span.action for span in spans}) == len(spans) == 2 * len(holders) * microbatches
    assert all(holders[span.action.stage] == span.worker for span in spans)
    for kind in "FB":
        for stage in range(len(holders)):
            finished = [
                a.microbatch
                for worker in listed
                for a in worker
                if (a.kind, a.stage) == (kind, stage)
            ]
            assert finished == sorted(finished), "sums would depend on the seconds"
    work = [
        sum(microbatches * sum(s) for s, holder in zip(stages, holders, strict=True) if holder == w)
        for w in range(workers)
    ]
    assert max(span.end for span in spans) >= max(work)


def test_an_order_by_readiness_is_as_short_as_the_known_ones_and_holds_less():
    for workers, microbatches in (
        (2, 4),
        (2, 8),
        (4, 8),
        (4, 16),
    ):
        stages = [(1.0, 2.0)] * (2 * workers)
        listed = as_ready(list(range(workers)) * 2, stages, microbatches)
        known_names = list_actions("interleaved1f1b", workers, 2, microbatches)
        ours, reference = (max(s.end for s in simulate(o, stages)) for o in (listed, known_names))
        assert ours <= 1.01 * reference
    alone = as_ready([0], [(1.0, 2.0)], 8)
    assert written(alone[0]) == "0a1b2c3d4e5f6g7h"

"""Messages between ranks, recorded from the code that sends them, and played like NCCL does:
without buffers.

NCCL does what a rank gives a communicator in that order, and may let a send last until its receive
has begun; gloo buffers, so that tests over gloo pass where GPUs would wait for ever. Two parts:

- `on_ranks` runs ranks as threads of one process that has a `torch.distributed` made of queues:
  messages arrive, sends never wait, and each rank's calls are noted in their order. Strategies,
  schedules and `World` are the real ones.
- `stuck` plays the notes back as the hardest machine would: each rank one queue over all
  communicators, the CPU's and the device's alike, a call leaves it only together with its
  counterparts, nothing is buffered. Orders that pass here pass on any number of streams and with
  any buffers, for these only let more calls begin.

Which calls go where under "cpu:gloo,cuda:nccl": objects (`share`, `gather`, `gather_object`) and
tensors on the CPU, such as what `RankSync` sums, go through gloo; tensors on the device, barriers
(the group is bound to a device) and all that DDP does go through NCCL.
"""

from __future__ import annotations

import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from trainer.distributed.world import World
from trainer.modes.pipeline import stages
from trainer.processes.rank import Place

# Seconds after which a waiting rank gives up; the machine may be busy.
SECONDS = 180


class Call(NamedTuple):
    """A part of a rank's call.

    Attributes:
        kind: "send", "recv", or a collective's name.
        peer: the other rank; -1 for collectives.
        ranks: of the group.
        what: elements and data type, or whatever else must agree.
        group: its name; several may have the same ranks.
    """

    kind: str
    peer: int
    ranks: tuple[int, ...]
    what: Any = None
    group: str = ""

    def answers(self, other: Call, me: int, them: int) -> bool:
        """Whether a send and a receive belong to each other."""
        kinds = {self.kind, other.kind} == {"send", "recv"}
        same = (self.ranks, self.what, self.group) == (other.ranks, other.what, other.group)
        return kinds and same and (self.peer, other.peer) == (them, me)


Queue = list[list[Call]]  # a rank's calls; what is batched together is one entry


def stuck(queues: list[Queue]) -> list[Call] | None:
    """Play the ranks' queues.

    Return None if all of them end, or else what each rank waits for (nothing if it has ended).
    """
    queues = [[list(entry) for entry in reversed(entries)] for entries in queues]
    heads = [entries.pop() if entries else [] for entries in queues]

    def done(rank: int, call: Call) -> None:
        heads[rank].remove(call)
        if not heads[rank] and queues[rank]:
            heads[rank] = queues[rank].pop()

    waiting = list(range(len(queues)))
    while waiting:
        rank = waiting.pop()
        for call in list(heads[rank]):
            if call.peer < 0:
                if all(call in heads[other] for other in call.ranks):
                    for other in call.ranks:
                        done(other, call)
                    waiting += call.ranks
                continue
            answer = next((c for c in heads[call.peer] if c.answers(call, call.peer, rank)), None)
            if answer is not None:
                done(rank, call)
                done(call.peer, answer)
                waiting += [rank, call.peer]
                break
    left = [next(iter(head), Call("nothing", -1, ())) for head in heads]
    return left if any(heads) else None


class _Group(NamedTuple):
    ranks: tuple[int, ...]
    group_name: str


class _P2POp:
    """The peer by its rank, or by its place in the group."""

    def __init__(
        self,
        op: Any,
        tensor: Any,
        peer: Any = None,
        group: Any = None,
        tag: Any = 0,
        group_peer: Any = None,
    ):
        self.op = op
        self.tensor = tensor
        self.group = group
        self.tag = tag
        self.peer = group.ranks[group_peer] if peer is None else peer
        self.group_peer = group.ranks.index(self.peer)


class _Done:
    """A send that has arrived in the queue, or a receive that is made when it is waited for."""

    def __init__(self, act: Any = None) -> None:
        self.act = act

    def wait(self) -> None:
        if self.act is not None:
            self.act()


class Network:
    """A `torch.distributed` for threads, by the names that this package and torch's
    pipelines call.
    """

    def __init__(self, size: int) -> None:
        self.notes: list[Queue] = [[] for _ in range(size)]
        self._every = _Group(tuple(range(size)), "0")
        self._me = threading.local()
        self._mail: dict[tuple[int, int, _Group], queue.Queue[Any]] = {}
        self._gates: dict[_Group, tuple[threading.Barrier, dict[int, Any]]] = {}
        self._lock = threading.Lock()

    def names(self) -> dict[str, Any]:
        own = [
            name
            for name in vars(type(self))
            if not name.startswith("_") and name not in ("names", "enter")
        ]
        return {**{name: getattr(self, name) for name in own}, "P2POp": _P2POp}

    def enter(self, rank: int) -> None:
        self._me.rank = rank
        self._me.batch = None
        self._me.groups = 0

    def _note(self, call: Call) -> None:
        if self._me.batch is not None:
            self._me.batch.append(call)
        else:
            self.notes[self._me.rank].append([call])

    def _letters(
        self,
        source: int,
        target: int,
        group: _Group,
    ) -> queue.Queue[Any]:
        """Return the queue between two ranks, whichever thread asks for it first."""
        with self._lock:
            return self._mail.setdefault((source, target, group), queue.Queue())

    def _told(
        self, kind: str, tensor: Any, peer: Any, group: Any, inside: Any
    ) -> tuple[int, _Group]:
        """The peer, by its rank or by its place in the group, and the group of a send or
        a receive.
        """
        group = group or self._every
        peer = group.ranks[inside] if peer is None else peer
        self._note(
            Call(
                kind,
                peer,
                group.ranks,
                (tensor.numel(), tensor.dtype),
                group.group_name,
            )
        )
        return peer, group

    def _exchange(
        self, kind: str, group: _Group | None, value: Any, what: Any = None
    ) -> dict[int, Any]:
        """Return the values of all members by rank, once all have called."""
        group = group or self._every
        self._note(Call(kind, -1, group.ranks, what, group.group_name))
        with self._lock:
            gate, slots = self._gates.setdefault(
                group, (threading.Barrier(len(group.ranks), timeout=SECONDS), {})
            )
        slots[self._me.rank] = value
        gate.wait()
        values = dict(slots)
        gate.wait()
        return values

    # Groups.

    def new_group(
        self,
        ranks: Any = None,
        timeout: Any = None,
        **_: Any,
    ) -> _Group:
        if ranks is None:  # The group of all ranks, on the CPU, for one call.
            return self._every
        self._me.groups += 1  # Each rank creates each group.
        return _Group(tuple(ranks), str(self._me.groups))

    def destroy_process_group(self, group: _Group) -> None:
        pass

    def get_rank(self, group: _Group | None = None) -> int:
        return (group or self._every).ranks.index(self._me.rank)

    def get_world_size(self, group: _Group | None = None) -> int:
        return len((group or self._every).ranks)

    def get_global_rank(self, group: _Group, inside: int) -> int:
        return group.ranks[inside]

    def get_backend(self, group: Any = None) -> str:
        return "nccl"

    def is_initialized(self) -> bool:
        return True

    # Point to point.

    def isend(
        self, tensor: Any, dst: Any = None, group: Any = None, tag: Any = 0, group_dst: Any = None
    ) -> _Done:
        to, group = self._told("send", tensor, dst, group, group_dst)
        assert tensor.is_contiguous(), "NCCL refuses it"
        self._letters(self._me.rank, to, group).put(tensor.detach().clone())
        return _Done()

    def irecv(
        self, tensor: Any, src: Any = None, group: Any = None, tag: Any = 0, group_src: Any = None
    ) -> _Done:
        source, group = self._told("recv", tensor, src, group, group_src)
        mail = self._letters(source, self._me.rank, group)

        def act() -> None:
            with torch.no_grad():
                tensor.copy_(mail.get(timeout=SECONDS).view(tensor.shape))

        return _Done(act)

    def send(self, *arguments: Any, **options: Any) -> None:
        self.isend(*arguments, **options).wait()

    def recv(self, *arguments: Any, **options: Any) -> None:
        self.irecv(*arguments, **options).wait()

    def batch_isend_irecv(self, operations: list[_P2POp]) -> list[_Done]:
        self._me.batch = []
        works = [one.op(one.tensor, one.peer, one.group) for one in operations]
        self.notes[self._me.rank].append(self._me.batch)
        self._me.batch = None
        return works

    # Collectives.

    def all_reduce(
        self,
        tensor: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:
        actual = self._exchange(
            "all_reduce",
            group,
            tensor.clone(),
            (tensor.numel(), tensor.dtype, str(op)),
        )
        values = torch.stack([actual[rank] for rank in sorted(actual)])
        tensor.copy_(values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0))
        return _Done() if async_op else None

    def broadcast(self, tensor: Any, src: int, group: Any = None) -> None:
        what = (tensor.numel(), tensor.dtype, src)
        tensor.copy_(
            self._exchange(
                "broadcast",
                group,
                tensor.detach().clone(),
                what,
            )[src]
        )

    def barrier(self, group: Any = None) -> None:
        self._exchange("barrier", group, None)

    def broadcast_object_list(
        self,
        box: list[Any],
        src: int,
        group: Any = None,
    ) -> None:
        box[:] = pickle.loads(
            self._exchange("broadcast_object_list", group, pickle.dumps(box), src)[src]
        )

    def all_gather_object(
        self,
        boxes: list[Any],
        value: Any,
        group: Any = None,
    ) -> None:
        actual = self._exchange("all_gather_object", group, pickle.dumps(value))
        boxes[:] = [pickle.loads(actual[rank]) for rank in (group or self._every).ranks]

    def gather_object(
        self, value: Any, boxes: list[Any] | None = None, dst: int = 0, group: Any = None
    ) -> None:
        actual = self._exchange("gather_object", group, pickle.dumps(value), dst)
        if boxes is not None:
            boxes[:] = [pickle.loads(actual[rank]) for rank in (group or self._every).ranks]


def on_ranks(
    size: int,
    work: Any,
) -> tuple[list[Any], list[Queue]]:
    """Return the result of `work(world)` on each rank, and the calls of each rank's communicators
    in order.
    """
    network = Network(size)

    def rank(number: int) -> Any:
        network.enter(number)
        place = Place(number, size, number, size, 0, True)
        return work(
            World(
                place,
                torch.device("cpu"),
                1,
                tuple(f"cpu:{n}" for n in range(size)),
            )
        )

    one_at_a_time = threading.Lock()
    all_done = threading.Barrier(size, timeout=SECONDS)
    trace = stages.trace

    def traced(*arguments: Any) -> Any:
        """Torch's tracer changes classes while it works, so each rank waits until all have
        traced.
        """
        with one_at_a_time:
            actual = trace(*arguments)
        all_done.wait()
        return actual

    with (
        mock.patch.multiple(dist, **network.names()),
        mock.patch.object(stages, "trace", traced),
        ThreadPoolExecutor(size) as pool,
    ):
        return list(pool.map(rank, range(size))), network.notes

"""A rank among its peers: its devices and threads, and the few words that ranks exchange.

Imports no torch at its top, which much that is here does without.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.devices import cards
from trainer.errors import PeerError, SetupError, TrainerError, in_one_line
from trainer.processes import silence
from trainer.processes.grid import Grid
from trainer.processes.peers import check_devices, check_sums, no_way
from trainer.processes.peers import lost_peers as lost_peers
from trainer.processes.rank import Place, check_meeting
from trainer.processes.silence import call_within
from trainer.processes.terminal import explain_delay

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

Made = TypeVar("Made")
DATA_PATIENCE = 86400.0  # seconds that a rank waits for machines which still look for their photos, fetch or cache them
FIRST_EXCHANGE = 60.0  # seconds, once all ranks are there
NCCL_LATER = datetime.timedelta(seconds=120)
MET = "all ranks are there, and wait for the first answer from each other"


@dataclass
class World:
    """This rank among its peers: its devices and threads from the start, its peers' devices once connected."""

    place: Place
    device: torch.device  # the first of those it drives
    threads: int
    devices: tuple[str, ...]  # every rank's, in rank order, once connected
    drives: tuple[torch.device, ...] = ()  # all that this process drives
    shared: bool = False  # ranks of this machine share a GPU
    nccl: bool = False  # what is on cards goes by NCCL
    timeout: float = 600.0  # seconds for which a rank or a device may be silent, once connected

    def __post_init__(self) -> None:
        self.drives = self.drives or (self.device,)
        self.grid = Grid(self.rank, {"replicas": self.size})
        self._groups: dict[str, list[Any]] = {}  # by dimension, of those that the world's own group does not serve

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_main(self) -> bool:
        return self.place.is_main

    def connect(self, timeout: float) -> None:
        """Join the process group, where there are several processes.

        Raises:
            PeerError: the others did not come within `timeout` seconds.
            SetupError: some ranks have a GPU and others none, this machine cannot talk to them, or sums come out wrong.
        """
        self.timeout = timeout
        if self.size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        check_meeting(self.place)
        limit = datetime.timedelta(seconds=timeout)
        with lost_peers():
            with explain_delay(self._missing):
                store = self._own_store() or next(rendezvous("env://", timeout=limit))[0]
                store.set_timeout(limit)
                self.agree(store)
            cuda = self.device.type == "cuda" and not self.shared  # NCCL wants a device for each rank
            if cuda and not dist.is_nccl_available():
                raise SetupError(cards.NO_NCCL)
            self.nccl = cuda
            with explain_delay(lambda: MET * self.is_main):
                try:
                    self.devices = call_within(FIRST_EXCHANGE, lambda: self._join(store, limit))
                except TimeoutError:
                    raise no_way(cuda, FIRST_EXCHANGE) from None

    def _join(self, store: Store, limit: datetime.timedelta) -> tuple[str, ...]:
        """Make the group, and exchange something in it: every rank's device, and a sum where there are cards."""
        import torch
        import torch.distributed as dist

        if self.nccl:
            torch.cuda.set_device(self.device)  # a thread's own
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.nccl else "gloo",
            timeout=silence.watch(limit.total_seconds()),
            device_id=self.device if self.nccl else None,
            store=store,
            rank=self.rank,
            world_size=self.size,
        )
        self._delay_nccl(dist.group.WORLD, limit)
        names: list[Any] = [None] * self.size
        dist.all_gather_object(names, self.name)
        if self.nccl:
            check_sums(self.device, self.rank, self.size)
        return tuple(names)

    def arrange(self, sizes: Mapping[str, int], groups: Mapping[str, int] | None = None) -> None:
        """Set the ranks on a grid and make the groups along its dimensions. Collective, over all.

        Neighbouring ranks differ in the last dimension. One of all ranks uses the world's own group, and one of a
        single rank needs none. `groups` says how many a dimension needs, where one is not enough: NCCL does what one
        group is given in order, so that messages which go both ways need two.
        """
        self.grid, self._groups = Grid(self.rank, dict(sizes)), {}
        with lost_peers() as dist:
            for dimension, size in sizes.items():
                count = (groups or {}).get(dimension, int(1 < size < self.size))
                for _ in range(count if size > 1 else 0):
                    for ranks in self.grid.lines(dimension):
                        group = dist.new_group(ranks, silence.watch(self.timeout))
                        if self.rank in ranks:
                            self._delay_nccl(group, datetime.timedelta(seconds=self.timeout))
                            self._groups.setdefault(dimension, []).append(group)

    def group(self, dimension: str | None, which: int = 0) -> Any:
        """A group along a dimension of the grid, for torch's functions; None stands for the world's own."""
        groups = self._groups.get(dimension or "")
        return groups[which] if groups else None

    def mesh(self) -> DeviceMesh:
        """The grid as torch's mesh, of the groups that are there: those that torch makes lack the recipe's timeout."""
        import torch
        from torch.distributed import group
        from torch.distributed.device_mesh import DeviceMesh

        names = tuple(name for name, size in self.grid.sizes.items() if size > 1)
        groups: list[Any] = [self.group(name) or group.WORLD for name in names]
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        ranks = torch.arange(self.size).view([self.grid.size(name) for name in names])
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)

    def _delay_nccl(self, group: Any, limit: datetime.timedelta) -> None:
        """NCCL's watchdog aborts the process after the group's timeout: later than gloo raises what can be reported."""
        if self.nccl:
            group._get_backend(self.device).set_timeout(limit + NCCL_LATER)

    def _missing(self) -> str:
        """What this rank waits for, where no torchrun has started the others."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return ""
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"rank {self.rank} waits for the other{'s' * (self.size > 2)} of {self.size} at {where}, as RANK and "
            "WORLD_SIZE say; to train alone unset them"
        )

    def agree(self, store: Store) -> None:
        """Find out what all ranks are on, before there is a group: nodes may differ, and a backend is for all."""
        store.set(f"device/{self.rank}", f"{self.device}{'#' * self.shared}")
        devices = [store.get(f"device/{rank}").decode() for rank in range(self.size)]
        self.shared = any(device.endswith("#") for device in devices)
        with_gpu = ["cuda" in device for device in devices]
        if any(with_gpu) and not all(with_gpu):
            raise SetupError(
                f"rank {with_gpu.index(True)} trains on a GPU and rank {with_gpu.index(False)} has none: "
                "start on nodes that all have GPUs, or write devices=[cpu]"
            )

    def _own_store(self) -> Store | None:
        """After a restart, keys of this attempt: the launcher's store still holds the addresses of ranks that died, and
        a rank that reads them waits for the dead (seen with torch 2.15 in one restart of three)."""
        if not self.place.restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.size, is_master=False)
        return PrefixStore(f"restart-{self.place.restarts}", store)

    @property
    def name(self) -> str:
        """This rank's device for humans, different for each: cpu:<rank>, cuda:0@1 on node 1, cuda:0#3 for rank 3 of
        several on one card, or in a job where some share one."""
        me = self.place
        if self.size == 1 or self.device.type == "cuda":
            node = f"@{me.rank // me.local_size}" if me.size > me.local_size else ""
            return f"{self.device}{node}" + (f"#{me.rank}" if self.shared else "")
        return f"cpu:{self.rank}"

    def driven(self) -> dict[str, torch.device]:
        """The devices that this process drives, by their names for humans; stand-ins on one device count once."""
        if len(self.drives) < 2:
            return {self.name: self.device}
        return {str(device): device for device in self.drives}

    def sharing(self) -> int:
        """Ranks on this rank's device: all of this machine's on its CPU."""
        if self.device.type != "cuda":
            return self.place.local_size
        cards = [name.partition("#")[0] for name in self.devices]
        return max(1, cards.count(self.name.partition("#")[0]))

    def count(self) -> int:
        """Devices over all ranks; workers that share a card count it once."""
        return len({name.partition("#")[0] for name in self.devices})

    def sum_(self, values: Tensor, along: str | None = None) -> Tensor:
        """Sum a tensor over all ranks, or those along a dimension of the grid, in place."""
        if self._several(along):
            with lost_peers() as dist:
                dist.all_reduce(values, group=self.group(along))
        return values

    def max_(self, values: Tensor) -> Tensor:
        """The maximum of a tensor over all ranks, in place."""
        if self.size > 1:
            with lost_peers() as dist:
                dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def broadcast_(self, values: Tensor, along: str | None = None) -> Tensor:
        """Rank 0's values of a tensor, or those of the first rank along a dimension, on every rank, in place."""
        if self._several(along):
            first = self.grid.ranks(along)[0] if along else 0
            with lost_peers() as dist:
                dist.broadcast(values, first, group=self.group(along))
        return values

    def _several(self, along: str | None) -> bool:
        return (self.grid.size(along) if along else self.size) > 1

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value (picklable and small; tensors go by `broadcast_`), on every rank."""
        if self.size > 1:
            box = [value if self.is_main else None]
            with lost_peers() as dist:
                dist.broadcast_object_list(box, src=0)
            return box[0]
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (picklable and small) in rank order on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        boxes: list[Any] | None = [None] * self.size if self.is_main else None
        with lost_peers() as dist:
            dist.gather_object(value, boxes)
        return boxes or []

    def gather_tensors(self, named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's tensors in rank order on rank 0, on the CPU; an empty list elsewhere.

        They are sent one by one: pickled, all of them would need their memory twice.
        """
        import torch

        mine = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        described = self.gather([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()])
        gathered = [mine] if self.is_main else []
        with lost_peers() as dist:
            for tensor in () if self.is_main else mine.values():
                dist.send(tensor, 0)
            for rank, tensors in enumerate(described[1:], 1):
                gathered.append({name: torch.empty(shape, dtype=dtype) for name, shape, dtype in tensors})
                for tensor in gathered[rank].values():
                    dist.recv(tensor, rank)
        return gathered

    def wait_for(self, value: Any, patience: float) -> list[Any]:
        """Every rank's value (picklable and small) on every rank, once the last has come, within `patience` seconds."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        with lost_peers(patience) as dist:
            group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience))
            dist.all_gather_object(boxes, value, group=group)
            dist.destroy_process_group(group)
        return boxes

    def all_or_none(self, make: Callable[[], Made], patience: float) -> Made:
        """What `make` gives on this rank, once the last rank has its own; where it fails on one, every rank raises."""
        error = None
        try:
            made = make()
        except TrainerError as caught:
            error = caught
        failed = [error for error in self.wait_for(error, patience) if error]
        if error is not None or failed:
            raise error or failed[0]
        return made

    def raise_any(self, error: Exception | None) -> None:
        """Raise on every rank where one has an error: that of the first rank whose own it is. Collective."""
        import torch

        if not self.max_(torch.tensor(float(error is not None))).item():
            return
        shown = error if isinstance(error, TrainerError) or error is None else TrainerError(in_one_line(error)[0])
        errors = [(rank, each) for rank, each in enumerate(self.gather(shown)) if each is not None]
        rank, first = self.broadcast_object(
            min(errors, key=lambda pair: isinstance(pair[1], PeerError), default=(0, None))
        )
        raise error if error is not None and rank == self.rank else first

    def on_main(self, make: Callable[[], Made]) -> Made | None:
        """What `make` gives on rank 0, None elsewhere; where it fails, every rank raises. Collective."""
        made, failed = None, None
        try:
            made = make() if self.is_main else None
        except TrainerError as error:
            failed = error
        self.raise_any(failed)
        return made

    def heartbeat(self) -> None:
        """Before a wait for devices, which may be for ever: whether all ranks are alive, asked on the CPU, and whether
        this one's devices end what they were given.

        Raises:
            PeerError: a rank is gone, or a rank or a device is silent for the `timeout` that `connect` was given.
        """
        if self.device.type != "cuda":
            return
        if self.size > 1:
            import torch

            self.sum_(torch.zeros(1))
        check_devices(self.drives, self.rank, self.size, self.timeout)

    def barrier(self) -> None:
        if self.size > 1:
            with lost_peers() as dist:
                dist.barrier()

    def close(self) -> None:
        """Leave the process group; only after a run that ended well (a broken group is left as it is)."""
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

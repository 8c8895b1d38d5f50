"""The world of a rank: its devices and threads, process groups, and collectives.

Torch is imported inside the functions, because a single-process run needs no collectives and should
not wait for the import of `torch.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.devices import cards
from trainer.distributed.grid import Grid
from trainer.distributed.peers import (
    check_devices,
    check_sums,
    explain_no_answer,
    translate_peer_errors,
)
from trainer.errors import PeerError, SetupError, TrainerError, explain_in_one_line
from trainer.processes import silence
from trainer.processes.rank import Place, check_meeting
from trainer.processes.silence import call_within
from trainer.processes.terminal import explain_delay

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work
    from torch.distributed.device_mesh import DeviceMesh

Made = TypeVar("Made")
# Timeout in seconds while other ranks search, download or cache their photos, or run user code.
DATA_PATIENCE = 86400.0
# Timeout in seconds of the first exchange, after all ranks have met at their store.
FIRST_EXCHANGE = 60.0
# Time by which the timeout of NCCL is longer than that of gloo. At NCCL's timeout, its watchdog
# aborts the process. Gloo's timeout comes first and raises an error, which can be reported.
NCCL_LATER = timedelta(seconds=120)
MET = "all ranks are there, and wait for the first answer from each other"


@dataclass
class World:
    """Devices, threads and process groups of this rank.

    Attributes:
        place: rank of this process and number of ranks.
        device: first device of this rank.
        threads: number of CPU threads.
        devices: names of the devices of this rank. Once `connect` has joined several ranks, the
            name of the first device of each rank, in rank order.
        local_devices: all devices of this rank.
        shared: whether ranks share a GPU, on this machine or, after `connect`, on any machine.
        nccl: whether tensors on GPUs are exchanged by NCCL.
        timeout: seconds for which a rank or a device may be silent. `connect` sets this value.
        grid: coordinates of this rank.
    """

    place: Place
    device: torch.device
    threads: int
    devices: tuple[str, ...]
    local_devices: tuple[torch.device, ...] = ()
    shared: bool = False
    nccl: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.rank = self.place.rank
        self.size = self.place.size
        self.is_main = self.place.is_main
        self.local_devices = self.local_devices or (self.device,)
        self.grid = Grid(self.rank, {"replicas": self.size})
        # Process groups by dimension. A dimension that contains all ranks uses the default group
        # and has no entry.
        self._groups: dict[str, list[Any]] = {}

    def connect(self, timeout: float) -> None:
        """Join the default process group if there are several ranks.

        Args:
            timeout: seconds to wait for other ranks.

        Raises:
            PeerError: a rank did not join in time.
            SetupError: only some ranks have a GPU, the ranks cannot exchange data, or their sums
                are wrong.
        """
        self.timeout = timeout
        if self.size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        check_meeting(self.place)
        limit = timedelta(seconds=timeout)
        with translate_peer_errors():
            with explain_delay(self._missing):
                store = self._own_store() or next(rendezvous("env://", timeout=limit))[0]
                store.set_timeout(limit)
                self.agree(store)
            # NCCL does not support several ranks on one GPU, so ranks that share a GPU use gloo.
            cuda = self.device.type == "cuda" and not self.shared
            if cuda and not dist.is_nccl_available():
                raise SetupError(cards.NO_NCCL)
            self.nccl = cuda
            with explain_delay(lambda: MET * self.is_main):
                try:
                    self.devices = call_within(FIRST_EXCHANGE, lambda: self._join(store, limit))
                except TimeoutError:
                    raise explain_no_answer(cuda, FIRST_EXCHANGE) from None

    def _join(self, store: Store, limit: timedelta) -> tuple[str, ...]:
        """Create the default group, and test it: gather the device names, and check sums on GPUs.

        Returns:
            The device name of each rank.
        """
        import torch
        import torch.distributed as dist

        if self.nccl:
            # NCCL may register the memory of captured collectives, which saves a copy. It then
            # needs all ranks for a capture, and has hung or accessed invalid memory (NVIDIA/nccl
            # issue 2389, NVIDIA/Megatron-LM issue 5474).
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            # The current device is set per thread, and `connect` calls this in a new thread.
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
            device_id = self.device
        else:
            backend = "gloo"
            device_id = None
        dist.init_process_group(
            backend,
            timeout=silence.set_limit(limit.total_seconds()),
            device_id=device_id,
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
        """Arrange the ranks on a grid, and create process groups along its dimensions. Collective.

        Args:
            sizes: number of ranks along each dimension. Consecutive ranks differ in the last one.
            groups: number of groups along a dimension if it needs more than one. NCCL processes the
                calls of a group in order, so messages in both directions need two groups. By
                default, a dimension has one group, except that a dimension of all ranks uses the
                default group.
        """
        self.grid = Grid(self.rank, dict(sizes))
        self._groups = {}
        with translate_peer_errors() as dist:
            for dimension, size in sizes.items():
                if size == 1:
                    continue
                default_count = int(size < self.size)
                count = (groups or {}).get(dimension, default_count)
                for _ in range(count):
                    for ranks in self.grid.lines(dimension):
                        group = dist.new_group(ranks, silence.set_limit(self.timeout))
                        if self.rank in ranks:
                            self._delay_nccl(group, timedelta(seconds=self.timeout))
                            self._groups.setdefault(dimension, []).append(group)

    def group(self, dimension: str | None, which: int = 0) -> Any:
        """Return this rank's process group along a dimension of the grid.

        Args:
            dimension: dimension of the grid; None for all ranks.
            which: index of the group if the dimension has several.

        Returns:
            The group, or None for the default group.
        """
        groups = self._groups.get(dimension or "")
        return groups[which] if groups else None

    def mesh(self) -> DeviceMesh:
        """Return the grid as a DeviceMesh that uses the existing process groups.

        Groups that torch creates would not have the timeout of the recipe.
        """
        import torch
        from torch.distributed import group
        from torch.distributed.device_mesh import DeviceMesh

        groups: dict[str, Any] = {}
        shape = []
        for name, size in self.grid.sizes.items():
            if size > 1:
                groups[name] = self.group(name) or group.WORLD
                shape.append(size)
        return DeviceMesh.from_group(
            [*groups.values()],
            self.device.type,
            torch.arange(self.size).view(shape),
            mesh_dim_names=tuple(groups),
        )

    def _delay_nccl(self, group: Any, limit: timedelta) -> None:
        """Set the NCCL timeout of a group to `limit` + `NCCL_LATER`.

        If a peer is silent, gloo then raises an error before NCCL aborts the process.
        """
        if self.nccl:
            group._get_backend(self.device).set_timeout(limit + NCCL_LATER)

    def _missing(self) -> str:
        """Return a message that other ranks have not joined; an empty string under torchrun."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return ""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        others = "other" if self.size == 2 else "others"
        return (
            f"rank {self.rank} waits for the {others} of {self.size} at {address}, as RANK and "
            "WORLD_SIZE say; to train alone unset them"
        )

    def agree(self, store: Store) -> None:
        """Check that all ranks use the same type of device, and set `shared` equally on all ranks.

        The type of device and `shared` determine the backend, which must be the same on all ranks.
        Before this call, a rank knows only the values of its own machine.

        Raises:
            SetupError: only some ranks have a GPU.
        """
        mark = "#" if self.shared else ""
        store.set(f"device/{self.rank}", f"{self.device}{mark}")
        devices = [store.get(f"device/{rank}").decode() for rank in range(self.size)]
        self.shared = any(device.endswith("#") for device in devices)
        with_gpu = ["cuda" in device for device in devices]
        if any(with_gpu) and not all(with_gpu):
            raise SetupError(
                f"rank {with_gpu.index(True)} trains on a GPU and rank {with_gpu.index(False)} has "
                "none: start on nodes that all have GPUs, or write devices=[cpu]"
            )

    def _own_store(self) -> Store | None:
        """Return a store with separate keys for this attempt if torchrun has restarted the job.

        The launcher's store still contains the addresses of ranks that died, and a rank that reads
        them waits forever (seen with torch 2.15 in a third of the restarts).
        """
        if not self.place.restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.size, is_master=False
        )
        return PrefixStore(f"restart-{self.place.restarts}", store)

    @property
    def name(self) -> str:
        """Name of this rank's device, which no other rank has.

        Examples are cpu:1 for rank 1 on a CPU, cuda:0@1 on node 1, and cuda:0#3 for rank 3 of a job
        in which ranks share GPUs.
        """
        if self.size > 1 and self.device.type != "cuda":
            return f"cpu:{self.rank}"
        place = self.place
        name = str(self.device)
        if place.size > place.local_size:
            name += f"@{place.rank // place.local_size}"
        if self.shared:
            name += f"#{place.rank}"
        return name

    def driven(self) -> dict[str, torch.device]:
        """Return the devices of this rank by name. Repeated devices are included once."""
        if len(self.local_devices) < 2:
            return {self.name: self.device}
        return {str(device): device for device in self.local_devices}

    def sharing(self) -> int:
        """Return the number of ranks on this rank's device. On a CPU, all local ranks share it."""
        if self.device.type != "cuda":
            return self.place.local_size
        cards = [name.partition("#")[0] for name in self.devices]
        return max(1, cards.count(self.name.partition("#")[0]))

    def count(self) -> int:
        """Return the number of devices of all ranks. A shared GPU is counted once."""
        return len({name.partition("#")[0] for name in self.devices})

    def sum_(self, values: Tensor, along: str | None = None) -> Tensor:
        """Sum a tensor over all ranks in place, and return it.

        If `along` names a dimension of the grid, the sum is only over the ranks on this rank's line
        along that dimension.
        """
        if self._several(along):
            with translate_peer_errors() as dist:
                dist.all_reduce(values, group=self.group(along))
        return values

    def start_sum(self, values: Tensor) -> Work:
        """Start to sum a tensor over all ranks in place, and return without waiting for it."""
        with translate_peer_errors() as dist:
            work: Work = dist.all_reduce(values, async_op=True)
        return work

    def wait(self, work: Work) -> None:
        """Wait for an operation that was started, on a GPU by its current stream."""
        with translate_peer_errors():
            work.wait()

    def max_(self, values: Tensor) -> Tensor:
        """Replace a tensor in place by its elementwise maximum over all ranks, and return it."""
        if self.size > 1:
            with translate_peer_errors() as dist:
                dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def is_any(self, flag: bool) -> bool:
        """Return on every rank whether `flag` is True on any rank. Collective."""
        import torch

        return bool(self.max_(torch.tensor(float(flag))))

    def broadcast_(self, values: Tensor, along: str | None = None) -> Tensor:
        """Copy rank 0's values of a tensor to all ranks in place, and return the tensor.

        If `along` names a dimension of the grid, the first rank of each line along that dimension
        sends its values to the other ranks on the line.
        """
        if self._several(along):
            first = self.grid.ranks(along)[0] if along else 0
            with translate_peer_errors() as dist:
                dist.broadcast(values, first, group=self.group(along))
        return values

    def exchange(
        self, values: Tensor, sizes: Sequence[int], counts: Sequence[int], along: str
    ) -> Tensor:
        """Send parts of a tensor to the ranks on this rank's line along a dimension of the grid.

        Args:
            values: values to send, 1-dim, in the order of the ranks.
            sizes: number of values for each rank.
            counts: number of values that each rank sends to this one.
            along: the dimension.

        Returns:
            The received values, 1-dim, in the order of the ranks.
        """
        if not self._several(along):
            return values
        received = values.new_empty(sum(counts))
        with translate_peer_errors() as dist:
            dist.all_to_all_single(received, values, [*counts], [*sizes], group=self.group(along))
        return received

    def _several(self, along: str | None) -> bool:
        return (self.grid.size(along) if along else self.size) > 1

    def broadcast_object(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank. Collective.

        Args:
            value: small object that can be pickled. Use `broadcast_` for tensors.
        """
        if self.size == 1:
            return value
        box = [value if self.is_main else None]
        with translate_peer_errors() as dist:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order on rank 0, and an empty list elsewhere.

        Collective.

        Args:
            value: small object that can be pickled.
        """
        if self.size == 1:
            return [value]
        boxes = [None] * self.size if self.is_main else None
        with translate_peer_errors() as dist:
            dist.gather_object(value, boxes)
        return boxes or []

    def gather_tensors(self, named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Gather named tensors on the CPU of rank 0. Collective.

        The tensors are sent one by one, because pickling all of them would need twice their memory.

        Args:
            named: tensors of this rank by name.

        Returns:
            The tensors of each rank in rank order on rank 0, and an empty list elsewhere.
        """
        import torch

        local = {}
        specs = []
        for name, tensor in named.items():
            copy = tensor.detach().cpu().contiguous()
            local[name] = copy
            specs.append((name, tuple(copy.shape), copy.dtype))
        specs_by_rank = self.gather(specs)
        with translate_peer_errors() as dist:
            if not self.is_main:
                for tensor in local.values():
                    dist.send(tensor, 0)
                return []
            gathered = [local]
            # Receive the tensors in the order in which the rank sends them, which is that of the
            # specs.
            for rank, specs in enumerate(specs_by_rank[1:], 1):
                tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in specs}
                gathered.append(tensors)
                for tensor in tensors.values():
                    dist.recv(tensor, rank)
        return gathered

    def wait_for(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order on every rank. Collective.

        The timeout is DATA_PATIENCE, for ranks that prepare their data or run user code.

        Args:
            value: small object that can be pickled.
        """
        if self.size == 1:
            return [value]
        boxes = [None] * self.size
        with translate_peer_errors(DATA_PATIENCE) as dist:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DATA_PATIENCE))
            dist.all_gather_object(boxes, value, group=group)
            dist.destroy_process_group(group)
        return boxes

    def all_or_none(self, make: Callable[[], Made]) -> Made:
        """Call a function on every rank, and return its result on this rank. Collective.

        Args:
            make: function without arguments.

        Raises:
            TrainerError: the function failed on a rank. Raised on every rank.
        """
        own_error = None
        try:
            result = make()
        except TrainerError as error:
            own_error = error
        # A rank that has failed must take part in this exchange, for which the other ranks wait.
        errors = [*filter(None, self.wait_for(own_error))]
        if errors:
            raise own_error or errors[0]
        return result

    def raise_any(self, error: Exception | None) -> None:
        """Raise an error on every rank if any rank has one. Collective.

        All ranks raise the error of the first rank that has one. A PeerError is raised only if no
        rank has an error of another type, because a rank often loses its peer as a consequence of
        the peer's own error.

        Args:
            error: error of this rank, if any.
        """
        if not self.is_any(error is not None):
            return
        if isinstance(error, TrainerError) or error is None:
            shown = error
        else:
            # Exceptions of libraries may not survive pickling, so their text is sent.
            shown = TrainerError(explain_in_one_line(error)[0])
        errors = [(rank, error) for rank, error in enumerate(self.gather(shown)) if error]
        first = min(errors, key=lambda pair: isinstance(pair[1], PeerError), default=(0, None))
        rank, first_error = self.broadcast_object(first)
        if error is not None and rank == self.rank:
            raise error
        raise first_error

    def on_main(self, make: Callable[[], Made]) -> Made | None:
        """Call a function on rank 0, and return its result there and None elsewhere. Collective.

        Args:
            make: function without arguments.

        Raises:
            TrainerError: the function failed. Raised on every rank.
        """
        result = None
        own_error = None
        try:
            if self.is_main:
                result = make()
        except TrainerError as error:
            own_error = error
        self.raise_any(own_error)
        return result

    def heartbeat(self) -> None:
        """Check that all ranks are alive and that the GPUs of this rank complete their work.

        Call this before the host waits for a device: a GPU that waits for a lost peer never
        finishes. For the same reason the ranks communicate on the CPU here. If the rank's device is
        a CPU, this does nothing. Collective.

        Raises:
            PeerError: a rank is gone, or a rank or a device was silent for `timeout` seconds.
        """
        if self.device.type != "cuda":
            return
        if self.size > 1:
            import torch

            # Gloo sums tensors on the CPU, and raises an error if a peer is gone.
            self.sum_(torch.zeros(1))
        check_devices(self.local_devices, self.rank, self.size, self.timeout)

    def barrier(self) -> None:
        """Wait until all ranks have called this method. Collective."""
        if self.size > 1:
            with translate_peer_errors() as dist:
                dist.barrier()

    def close(self) -> None:
        """Destroy the process group after a successful run. Do not call this after a failure."""
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

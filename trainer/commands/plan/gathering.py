"""What `fully_shard` allocates around a pass: each event of it in its order, as bytes beside those of the operators.

Written after torch 2.15's `FSDPParamGroup`, and held to what ranks really hold by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.models.memory import Allocations, size_of


class Unit:
    """A module that is gathered by itself, or the root with what is in no unit."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.module, self.parameters = module, parameters
        self.trained = [p for p in parameters if p.requires_grad]
        self.size, self.gradients = size_of(*parameters), size_of(*self.trained)
        self.whole = self.arriving = self.used = False
        self.waits_for = 0  # gradients


class Gathering:
    """In this context passes of a whole model are counted as those of a rank that has a part of it."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parts: int,
        reshard: bool,
        stays: bool,
        offload: bool,
        seen: Allocations,
    ) -> None:
        """`names` are those of the units; `stays` says that gradients exist already, the others are `sharded`'s."""
        inside = {p for name in names for p in model.get_submodule(name).parameters()}
        self.root = Unit(model, [p for p in model.parameters() if p not in inside])
        units = [Unit(module, [*module.parameters()]) for module in map(model.get_submodule, names)]
        self.units, self.parts, self.reshard, self.offload, self.seen = units, parts, reshard, offload, seen
        self.stays = stays or offload  # for what the device holds
        self.order: list[Unit] = []
        self.copies = self.sent = 0  # of weights that have arrived last, and of gradients that were reduced last

    def __enter__(self) -> None:
        self.hooks: list[Any] = []
        for unit in [self.root, *self.units]:
            self.hooks += [
                unit.module.register_forward_pre_hook(self._of(unit, self._before_forward), prepend=True),
                unit.module.register_forward_hook(self._of(unit, self._after_forward)),
            ]
            for parameter in unit.trained:
                hook = self._of(unit, self._gradient)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self._reduce(self.root)  # at the end of the backward pass

    def _of(self, unit: Unit, work: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: work(unit, *arguments)

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        if not unit.whole:
            self._gather(unit)
            self.seen.hold(-self.copies)
            self.copies = unit.size
            self.seen.hold(unit.size)
            unit.whole = True

    def _after_forward(self, unit: Unit, _: Any, __: Any, outputs: Any) -> None:
        if unit is not self.root:
            self.order.append(unit)
            if self.reshard:
                self._free(unit)
        unit.waits_for, unit.used = len(unit.trained), False
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._of(unit, self._before_backward))  # type: ignore[no-untyped-call]

    def _before_backward(self, unit: Unit, *_: Any) -> None:
        if unit.used:
            return
        unit.used = True
        self.seen.hold(-self.copies)
        self.copies = 0
        if not unit.whole:
            if not unit.arriving:
                self._gather(unit)
            self.seen.hold(unit.size)
            self.seen.hold(-unit.size)
            unit.whole, unit.arriving = True, False
        before = self.order[self.order.index(unit) - 1] if unit in self.order[1:] else None
        if unit is self.root:
            before = self.order[-1] if self.order else None
        if before is not None and not before.whole and not before.arriving:
            self._gather(before)
            before.arriving = True

    def _gather(self, unit: Unit) -> None:
        local_part = unit.size // self.parts * self.offload
        self.seen.hold(local_part + unit.size)
        self.seen.hold(-local_part)

    def _gradient(self, unit: Unit, *_: Any) -> None:
        unit.waits_for -= 1
        if not unit.waits_for and unit is not self.root:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._free(unit)
        self.seen.hold(-self.sent)
        self.sent = unit.gradients
        self.seen.hold(self.sent)
        self.seen.hold(-unit.gradients)  # as they came from the operators
        self.seen.hold(unit.gradients // self.parts)
        if self.stays:
            self.seen.hold(-(unit.gradients // self.parts))

    def _free(self, unit: Unit) -> None:
        self.seen.hold(-unit.size * unit.whole)
        unit.whole = False

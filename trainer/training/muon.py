"""torch's Muon for hidden layers and AdamW for all else, as one optimizer that a flag on the device makes skip."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` on their own parameters, at one learning rate.

    A convolution's weight is a matrix with a row for each output channel (Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks", https://kellerjordan.github.io/posts/muon): torch's Muon is given a view of it.
    Its rate is adjusted to each matrix's shape so that its steps are as long as AdamW's (torch's match_rms_adamw, of
    Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982): a rate and a decay that suit AdamW suit both.
    Muon itself knows no `found_inf`: each matrix is put back where the flag says so, which waits for nothing. It is
    written in place, as torch's steps do: under Hogwild other workers' updates of it must not be lost.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Collection[nn.Parameter],
        lr: float,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`groups` are as torch's optimizers take them; `betas` and `eps` are AdamW's, the other numbers Muon's."""
        # One matrix each: what has to be kept aside in a step is one matrix, not all of them.
        mine = [{**group, "params": [p], "lr": lr} for group in groups for p in group["params"] if p in matrices]
        others = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        others = [group for group in others if group["params"]]
        self.adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        theirs = self.adamw.param_groups if self.adamw is not None else []
        super().__init__([*mine, *theirs] or groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.own = self.param_groups[: len(mine)]
        self.muon = partial(Muon, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
        if self.adamw is not None:
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are."""
        for group in self.own:
            (parameter,) = group["params"]
            if parameter.grad is None:
                continue
            matrix, buffer, gradient = _matrices(parameter, self.state[parameter]["momentum_buffer"], parameter.grad)
            before = [tensor.clone() for tensor in (matrix, buffer)]
            matrix = nn.Parameter(matrix)  # anew in each step, which costs microseconds: storage may move
            matrix.grad = gradient
            muon = self.muon([matrix], lr=group["lr"], weight_decay=group["weight_decay"])
            muon.state[matrix] = {"momentum_buffer": buffer}
            muon.step()  # type: ignore[no-untyped-call]
            if self.found_inf is not None:
                bad = self.found_inf.to(parameter.device, non_blocking=True) > 0
                for tensor, was in zip((matrix, buffer), before, strict=True):
                    torch.where(bad, was, tensor, out=tensor)
        if self.adamw is not None:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()


def _matrices(weight: Tensor, buffer: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each of shape (outputs, all else), the first two as views, in whichever order the weight lies in memory."""
    first, second, third = (
        tensor if weight.is_contiguous() else tensor.movedim(1, -1) for tensor in (weight, buffer, gradient)
    )
    rows = len(weight)
    return first.view(rows, -1), second.view(rows, -1), third.reshape(rows, -1)

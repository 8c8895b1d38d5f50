"""torch's Muon for hidden matrices and AdamW for all else, as one optimizer that a flag on the device makes skip."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` on their own parameters, at one learning rate.

    Muon's is adjusted to each matrix's shape so that its steps are as long as AdamW's (torch's match_rms_adamw, of Liu
    et al., "Muon is Scalable for LLM Training", arXiv:2502.16982): a rate and a decay that suit AdamW suit both.
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
        self.muons = [
            Muon(
                [{**group, "params": [p]}], lr=lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
            )
            for group in groups
            for p in group["params"]
            if p in matrices
        ]
        others = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in groups]
        others = [group for group in others if group["params"]]
        self.adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        parts: list[torch.optim.Optimizer] = [*self.muons, *([self.adamw] if self.adamw is not None else [])]
        super().__init__([group for part in parts for group in part.param_groups] or groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients there are."""
        for muon in self.muons:
            (parameter,) = muon.param_groups[0]["params"]
            if parameter.grad is None:
                continue
            tensors = (parameter, self.state[parameter]["momentum_buffer"])
            before = [tensor.clone() for tensor in tensors]
            muon.step()  # type: ignore[no-untyped-call]
            if self.found_inf is not None:
                bad = self.found_inf.to(parameter.device, non_blocking=True) > 0
                for tensor, was in zip(tensors, before, strict=True):
                    torch.where(bad, was, tensor, out=tensor)
        if self.adamw is not None:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

"""State of modules that is no tensor: what `get_extra_state` gives and `set_extra_state` takes, torch's own interface.

It travels as bytes, (n,) uint8, under its key of `state_dict()`; n may differ from save to save.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trainer.errors import CheckpointError, RecipeError
from trainer.saving.weights import EXTRA_STATE, as_bytes, from_bytes


def holders(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have such state, by its key."""
    named = model.named_modules(remove_duplicate=False)
    own = {name: part for name, part in named if _has(part, "get_extra_state") and _has(part, "set_extra_state")}
    return {f"{name}.{EXTRA_STATE}".lstrip("."): module for name, module in own.items()}


def _has(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method)


def extra_state(model: nn.Module) -> dict[str, Tensor]:
    """All of it by its key, on the CPU.

    Raises:
        RecipeError: naming a module whose state holds more than tensors and plain values.
    """
    packed = {}
    for key, module in holders(model).items():
        try:
            packed[key] = as_bytes(module.get_extra_state())
            from_bytes(packed[key])
        except Exception as error:  # a user's code, and pickle, may raise anything
            reason = " ".join(str(error).split("\n\n")[-1].split())[:160]
            raise RecipeError(
                f"{key}, of {type(module).__name__}.get_extra_state(), cannot be saved in a file that is safe to load "
                f"({type(error).__name__}: {reason}): let it return tensors, numbers, strings, lists and dictionaries"
            ) from None
    return packed


def load_extra_state(model: nn.Module, saved: Mapping[str, Tensor], source: str) -> None:
    """Give each module its own, of which tensors are on the CPU.

    Raises:
        CheckpointError: `saved`, of this `source`, lacks one, or its module does not take it.
    """
    for key, module in holders(model).items():
        if key not in saved:
            raise CheckpointError(f"{source}: holds no {key}, which {type(module).__name__}.set_extra_state() needs")
        try:
            module.set_extra_state(from_bytes(saved[key]))
        except Exception as error:  # as above
            reason = " ".join(str(error).split())[:160]
            raise CheckpointError(f"{source}: {key} cannot be loaded ({type(error).__name__}: {reason})") from None


def require_kept(model: nn.Module, name: str, mode: str, alike: bool) -> None:
    """Raises RecipeError before training where such state could not be saved, nor loaded, or `mode` has no `alike`
    modules."""
    for module in model.modules():
        if _has(module, "get_extra_state") and not _has(module, "set_extra_state"):
            raise RecipeError(
                f"model.name={name}: {type(module).__name__} has get_extra_state() and no set_extra_state(), so no run "
                "could go on with what it gives: write both, or neither"
            )
    state = extra_state(model)
    if state and not alike:
        raise RecipeError(
            f"model.name={name} has state beside its tensors ({next(iter(state))}), which mode={mode} would lose: "
            "use mode=single, mode=ddp or mode=fsdp"
        )

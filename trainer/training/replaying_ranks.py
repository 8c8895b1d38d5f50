"""Ranks that capture and replay a step together: agreement on whether all of them can.

NCCL requires that either all ranks capture a collective or none, and so for its replays. Ranks of a
pipeline follow the same rule, because they compare their captures together.
"""

from collections.abc import Callable
from typing import TypeVar

from trainer.errors import RecipeError, is_out_of_memory
from trainer.modes.base import Strategy

Made = TypeVar("Made")
NO_MEMORY = "there is not enough memory to capture it"


class ReplayingRanks:
    """The ranks that capture and replay a step together, because they exchange messages in it.

    Ranks that exchange nothing in their passes replay alone: then `is_any` and `do` look at this
    rank only.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._world = strategy.world
        self._are_several = strategy.captures_exchange

    def is_any(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank. Collective."""
        return self._world.is_any(condition) if self._are_several else condition

    def do(self, work: Callable[[], Made]) -> Made:
        """Return the result of work that exchanges no message, if all ranks can do it. Collective.

        Without this, a rank that fails would leave the others waiting for its next message. The run
        ends after a failure, because torch's schedules and `fully_shard` keep the state of a pass
        whose capture has failed.

        Raises:
            RecipeError: the work failed on a rank. Raised on every rank.
        """
        if not self._are_several:
            return work()
        refusal = None
        try:
            result = work()
        except Exception as error:
            reason = NO_MEMORY if is_out_of_memory(error) else error
            refusal = RecipeError(f"graphs=true is not possible here: {reason}; set graphs=false")
        self._world.raise_any(refusal)
        return result

    def share_reason(self, reason: str | None) -> str | None:
        """Return the reason of the first rank that has one against captures. Collective."""
        if self._world.size == 1:
            return reason
        reasons: list[str | None] = self._world.broadcast_object(self._world.gather(reason))
        for rank, text in enumerate(reasons):
            if text is not None:
                return f"{text} (rank {rank})"
        return None

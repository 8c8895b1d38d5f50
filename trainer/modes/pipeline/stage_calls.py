"""Calls of a rank's stages within a step of torch's schedule: eager, captured, or replayed.

The calls compute an action (the forward or backward pass of one micro-batch on a stage), a loss, or
the BatchNorm statistics of a step. Each of them is a CUDA graph. Torch's schedule itself runs in
Python in every step, and sends and receives eager messages between the calls. So NCCL is not part
of these graphs, and a rank receives into the same memory as in eager steps.

A capture computes nothing, so its messages would be rubbish, and none are sent.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from trainer.devices.cuda_graphs import StepRecorder
from trainer.modes.pipeline.orders import Action


@dataclass
class CapturedCall:
    """A captured call.

    Attributes:
        action: The action, or None for a loss or statistics.
        replay: Replays its graph.
        result: What the call returned, without autograd history.
        caches: The stage's `fwd_cache` and `bwd_cache` after the call, which contain the messages
            to be sent. The references also keep later graphs from overwriting a message while it is
            sent.
    """

    action: Action | None
    replay: Callable[[], None]
    result: Any
    caches: Sequence[dict[int, Any]]


class StageCalls:
    """Runs the calls of a rank's stages. All steps have the same calls, in the same order."""

    def __init__(self) -> None:
        # Captures the calls. None outside of a capture.
        self.step_recorder: StepRecorder | None = None
        # Calls of the running step that are not replayed yet. None unless the step is replayed.
        self._replayed: Iterator[CapturedCall] | None = None

    @contextmanager
    def capturing(self, recorder: StepRecorder) -> Iterator[list[CapturedCall]]:
        """Capture the calls of the step in this block, and yield the list that will have them."""
        self.step_recorder = recorder
        self._captured: list[CapturedCall] = []
        try:
            yield self._captured
        finally:
            self.step_recorder = None

    @contextmanager
    def replaying(self, captured: Iterable[CapturedCall]) -> Iterator[None]:
        """Replay these calls in the step in this block."""
        self._replayed = iter(captured)
        try:
            yield
            assert next(self._replayed, None) is None, (
                "a step has fewer calls than the captured one"
            )
        finally:
            self._replayed = None

    def run(
        self,
        work: Callable[[], Any],
        stage: PipelineStage | None = None,
        action: Action | None = None,
    ) -> Any:
        """Run the next call of a step.

        Args:
            work: the call.
            stage: torch's stage, in which the call leaves messages.
            action: the action that the stage computes. None for a loss or statistics.

        Returns:
            The result of `work`, or of the replayed call.

        Raises:
            NotCapturable: the call cannot be captured.
        """
        if self._replayed is not None:
            call = next(self._replayed)
            assert call.action == action, "a step has other calls than the captured one"
            call.replay()
            if stage:
                # Copies, because the schedule removes what it has sent.
                stage.fwd_cache, stage.bwd_cache = map(dict, call.caches)
            return call.result
        if self.step_recorder is None:
            return work()
        replay, result = self.step_recorder.record(work)
        caches = [stage.fwd_cache, stage.bwd_cache] if stage else []
        kept = tree_map_only(Tensor, Tensor.detach, [action, replay, result, caches])
        self._captured.append(CapturedCall(*kept))
        return result

    def suppress_messages(self, stage: Any) -> None:
        """Send and receive nothing for this stage in captures."""
        for name in (
            "get_fwd_recv_ops",
            "get_fwd_send_ops",
            "get_bwd_recv_ops",
            "get_bwd_send_ops",
        ):
            setattr(stage, name, partial(self._list_messages, getattr(stage, name)))

    def _list_messages(self, method: Callable[[int], list[Any]], microbatch: int) -> list[Any]:
        # The method is also called in a capture, because it removes what was sent from the stage.
        messages = method(microbatch)
        return messages if self.step_recorder is None else []

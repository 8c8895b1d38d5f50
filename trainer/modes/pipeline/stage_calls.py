"""Calls of a rank's stages within a step of torch's schedule: eager, captured, or replayed.

The calls compute an action (the forward or backward pass of one micro-batch on a stage), a loss, or
the BatchNorm statistics of a step. Each of them is a CUDA graph. Torch's schedule itself runs in
Python in every step, and sends and receives eager messages between the calls. So NCCL is not part
of these graphs, and a rank receives into the same memory as in eager steps.

A capture computes nothing, so its messages would be rubbish, and none are sent.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from trainer.devices.cuda_graphs import StepRecorder


@dataclass
class RecordedCall:
    """A captured call.

    Attributes:
        replay: Replays its graph.
        result: What the call returned, without autograd history.
        sent: What the call left in the stage to be sent: the entries of its micro-batch in the
            stage's `fwd_cache` and `bwd_cache`. The references also keep later graphs from
            overwriting a message while it is sent.
    """

    replay: Callable[[], None]
    result: Any
    sent: tuple[Any, Any]


class StageCalls:
    """Runs the calls of a rank's stages. All steps have the same calls, in the same order."""

    def __init__(self) -> None:
        # Captures the calls. None outside of a capture.
        self.recorder: StepRecorder | None = None
        self._recorded: list[RecordedCall] = []
        # Calls of the running step that are not replayed yet. None unless the step is replayed.
        self._replayed: Iterator[RecordedCall] | None = None

    @contextmanager
    def recording(self, recorder: StepRecorder) -> Iterator[list[RecordedCall]]:
        """Capture the calls of the step in this block, and yield the list that will have them."""
        self.recorder = recorder
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self.recorder = None

    @contextmanager
    def replaying(self, recorded: Iterable[RecordedCall]) -> Iterator[None]:
        """Replay these calls in the step in this block."""
        self._replayed = iter(recorded)
        try:
            yield
        finally:
            self._replayed = None

    def run(
        self,
        work: Callable[[], Any],
        stage: PipelineStage | None = None,
        microbatch: int = 0,
        is_empty: bool = False,
    ) -> Any:
        """Run the next call of a step.

        Args:
            work: the call.
            stage: the stage in which the call leaves messages, if any.
            microbatch: index of the micro-batch.
            is_empty: True if the call computes nothing, and so cannot be captured.

        Returns:
            The result of `work`, or of the replayed call.

        Raises:
            NotCapturable: the call cannot be captured.
        """
        caches: list[dict[int, Any]] = []
        if stage:
            caches = [stage.fwd_cache, stage.bwd_cache]
        if self._replayed is not None:
            call = next(self._replayed)
            call.replay()
            for cache, entry in zip(caches, call.sent, strict=False):
                if entry is not None:
                    cache[microbatch] = entry
            return call.result
        if self.recorder is None:
            return work()
        if is_empty:
            replay, result = (lambda: None), work()
        else:
            replay, result = self.recorder.record(work)
        sent = tuple(cache.get(microbatch) for cache in caches)
        self._recorded.append(
            RecordedCall(replay, *tree_map_only(Tensor, Tensor.detach, (result, sent)))
        )
        return result

    def watch_messages(self, stage: Any) -> None:
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
        return messages if self.recorder is None else []

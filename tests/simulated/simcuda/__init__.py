"""Simulated CUDA devices, so that code for GPUs is checked on machines without one.

`with simulated(2) as machine:` gives torch two devices `cuda:0` and `cuda:1`. A tensor "on" one of
them is a CPU tensor whose storage is tagged, so the maths is the CPU's; what is added is the
bookkeeping that a GPU leaves to the programmer. Every kernel, of backward passes and of torch's own
code too, is charged to the current stream of its device. What was done wrong is in
`machine.errors`; mixed devices raise, as on a GPU.

What is simulated, by file:

- `machine`: devices, which may be unlike each other, and the errors found.
- `order`: streams, events, and what happens before what (`StreamSynchronizations` of torch's own
  CUDA sanitizer). An event is complete only once the host has waited for it, or has asked twice. A
  device may hang: who waits for it then sleeps for ever in C. A copy to pinned memory arrives at
  the host's next wait for it and not before; until then the memory holds rubbish.
- `memory`: which storage lies where; a RACE, where two streams touch memory in no order and one of
  them writes; the caching allocator's pools, a stream each, and with them REUSE: memory that is
  given away while another stream may still be using it, because nobody called `record_stream`;
  pinned memory; allocated, reserved and peak bytes, and no more than a card has.
- `kernels`: a `TorchDispatchMode` that charges kernels, refuses tensors of several devices as CUDA
  does, draws random numbers from its device's generator, and finds what makes the host wait.
- `functions`: a `TorchFunctionMode` that turns devices in arguments into tags, and tags into
  devices where code asks.
- `waits`: waits of the host by the line that caused them, and clocks that are read while a device
  is busy.
- `stubs`: `torch.cuda`, `torch.accelerator`, autocast (thread-local, with its dtype),
  `nn.DataParallel`'s copies and threads, process groups (gloo stands in for NCCL), grouping by
  device in optimizers.
- `graphs`: captures, in which nothing waits and nothing is outside; private pools, whose memory
  goes to another graph once nobody holds it; replays, each one kernel of its stream.
- `plugin`: a whole command on simulated cards.
- `sources`: lines of the project found in its syntax trees, to take them out (mutants).

What is not: speed, numerics of CUDA kernels (TF32, cuDNN, atomics), compiled code, NCCL itself,
and errors that only a driver can give.
"""

from tests.simulated.simcuda.machine import Card, Machine
from tests.simulated.simcuda.stubs import simulated

__all__ = ["Card", "Machine", "simulated"]

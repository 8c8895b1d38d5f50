"""A machine with faults, for every Python that finds this folder first on its path: which, is in `FAULTY_MACHINE`.

Each fault is put in where the machine, or torch, would have it: behind the functions that training and measuring call.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

FAULTS = os.environ.get("FAULTY_MACHINE", "").split()
WORDS = getattr(sys, "argv", sys.orig_argv)  # of the command that this Python runs
RANK = os.environ.get("RANK", WORDS[-1])  # of a run's process, or of a measuring one


def hooked(name, patch):
    """Call `patch` with a module once it has been imported."""
    if name in sys.modules:
        patch(sys.modules[name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        busy = False

        def find_spec(self, fullname, path=None, target=None):
            if fullname != name or self.busy:
                return None
            self.busy = True
            spec = importlib.util.find_spec(fullname)
            self.busy = False
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                patch(module)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


def wrapped(module, name, around):
    """Replace a function by `around(function, *its arguments)`, also where it has been imported from there."""
    function = getattr(module, name)

    def other(*given, **named):
        return around(function, *given, **named)

    for each in [module, *sys.modules.values()]:
        if vars(each).get(name) is function:
            setattr(each, name, other)


def wrong_copy(dist):
    """Large messages arrive shifted by one element."""

    def recv(function, tensor, *given, **named):
        function(tensor, *given, **named)
        if tensor.numel() > 2**20:
            tensor.copy_(tensor.roll(1))

    wrapped(dist, "recv", recv)


def wrong_sum(dist):
    """One element is counted twice on rank 1."""

    def all_reduce(function, tensor, *given, **named):
        done = function(tensor, *given, **named)
        if RANK == "1" and tensor.numel() == 1023:
            tensor[5] *= 2
        return done

    wrapped(dist, "all_reduce", all_reduce)


def other_network(ddp):
    """ddp trains with half of one layer's gradient."""
    setup = ddp.DistributedDataParallel.setup

    def halved(self, model):
        setup(self, model)
        parameter = list(self.module.parameters())[4]
        parameter.register_hook(lambda gradient: gradient / 2)

    ddp.DistributedDataParallel.setup = halved


def repeated_step(resuming):
    """A resumed run trains the checkpoint's last step again."""
    restore = resuming.restore

    def back(resolved, state, saved):
        restore(resolved, state, saved)
        step, epoch, inside = state.position
        state.position = type(state.position)(step, epoch, inside - 1)

    resuming.restore = back


def counted_twice(sampling):
    """The first image of every later span is the last of the one before, which another is missed for."""

    def spans(function, samples, rows, index):
        return [
            (start - 1, stop - 1) if start and stop - start == rows[index] else (start, stop)
            for start, stop in function(samples, rows, index)
        ]

    wrapped(sampling, "evaluation_spans", spans)


def wrong_kernels(torch):
    """What is compiled computes something else."""
    if "compile=true" in WORDS:
        linear = torch.nn.functional.linear
        torch.nn.functional.linear = lambda *given: 1.01 * linear(*given)


KEPT = []


def leak(loop):
    """Each run in a program keeps 48 MiB."""
    wrapped(loop, "finish", lambda function, run: (KEPT.append(bytearray(os.urandom(48 << 20))), function(run))[1])


def left_behind(loop):
    """A run with several ranks leaves a block of shared memory."""

    def finish(function, run):
        if os.environ.get("RANK") == "1":  # of now: ranks may be forked
            with open(f"/dev/shm/left-by-a-test-{os.getpid()}", "wb") as file:
                file.write(b"\0" * 4096)
        return function(run)

    wrapped(loop, "finish", finish)


def few_files(sys):
    """A process may have few files open."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))


def slow_link(dist):
    """What rank 1 sends takes its time."""

    def send(function, tensor, *given, **named):
        time.sleep(0.5 * (RANK == "1"))
        return function(tensor, *given, **named)

    wrapped(dist, "send", send)


PLACES = {
    "few_files": "sys",
    "wrong_copy": "torch.distributed",
    "wrong_sum": "torch.distributed",
    "slow_link": "torch.distributed",
    "other_network": "trainer.modes.ddp",
    "repeated_step": "trainer.training.resuming",
    "counted_twice": "trainer.data.sampling",
    "wrong_kernels": "torch",
    "leak": "trainer.training.loop",
    "left_behind": "trainer.training.loop",
}
for fault in FAULTS:
    hooked(PLACES[fault], globals()[fault])

"""A machine with the faults in `FAULTY_MACHINE`, for every Python process with this folder first on
its path.

Each fault is put in where the machine, or torch, would have it: behind the functions that training
and measuring call.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

FAULTS = os.environ.get("FAULTY_MACHINE", "").split()
WORDS = getattr(sys, "argv", sys.orig_argv)  # The command line of this Python process.
RANK = os.environ.get("RANK", WORDS[-1])  # The rank of a run's process, or of a measuring process.


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
    """Replace a function by `around(function, *its arguments)`, and its names in other modules,
    too.
    """
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
    """Count one element twice on rank 1."""

    def all_reduce(function, tensor, *given, **named):
        finished = function(tensor, *given, **named)
        if RANK == "1" and tensor.numel() == 1023:
            tensor[5] *= 2
        return finished

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


def wrong_kernels(torch):
    """Make compiled code compute something else."""
    if "compile=true" in WORDS:
        linear = torch.nn.functional.linear
        torch.nn.functional.linear = lambda *given: 1.01 * linear(*given)


def few_files(sys):
    """A process may have few files open."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))


def slow_link(dist):
    """Delay what rank 1 sends."""

    def send(function, tensor, *given, **named):
        time.sleep(0.5 * (RANK == "1"))
        return function(tensor, *given, **named)

    wrapped(dist, "send", send)


def quiet(report):
    """No other process uses the machine, although other tests do."""
    report.OtherProcesses.cores = lambda self: 0.0


PLACES = {
    "quiet": "trainer.commands.trials.report",
    "few_files": "sys",
    "wrong_copy": "torch.distributed",
    "wrong_sum": "torch.distributed",
    "slow_link": "torch.distributed",
    "other_network": "trainer.modes.ddp",
    "repeated_step": "trainer.training.resuming",
    "wrong_kernels": "torch",
}
for fault in FAULTS:
    hooked(PLACES[fault], globals()[fault])

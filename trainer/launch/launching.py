"""Decide whether to start ranks, and run torch's launcher in this process.

The only launcher is torch's own. `start` calls it within this process, so that the exit code and
the line of a failed rank reach the user unchanged. Ranks are forked within milliseconds from a
server that has imported torch and this package once. This process does not import torch before
`start` is called.
"""

import importlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trainer.devices.assignment import assign_devices
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.launch import endings
from trainer.launch.endings import SMALLER, SMALLER_AFTER, Ending
from trainer.launch.topology import Launch, bound_by_mpi, choose_launch, task_of_node
from trainer.processes import early, family, faults, fork_server, interrupts, resources
from trainer.processes.rank import LAUNCHER, check_meeting, read_elastic_nodes, read_place
from trainer.processes.terminal import explain_delay
from trainer.recipe import Recipe
from trainer.recipe.checks import check_loggers, check_processes

MAIN = "trainer.__main__"
# Seconds after which the exception for a signal is raised again, in case torch has caught it.
RERAISE_SECONDS = 1.0
# Environment variable that is set for runs whose losses are compared, so that all of these runs use
# the same kernels: see `training/randomness.py`.
EXACT = "TRAINER_EXACT"


def launch_to_start(
    recipe: Recipe, nproc: str | None = None, max_restarts: int = 0
) -> Launch | None:
    """Choose the ranks of a run, and check that the recipe can run on these ranks and devices.

    This is fast, so that mistakes are reported before anything slow starts.

    Returns:
        The ranks to `start`, or None if this process trains: it is a rank already, or the only one.

    Raises:
        RecipeError: the recipe cannot run with these processes and devices.
        SetupError: a logger is not installed, ranks cannot connect, or TORCH_DISTRIBUTED_DEBUG has
            a value that crashes DDP.
    """
    check_loggers(recipe)
    rank = read_place()
    if rank.launched:
        if nproc is not None and nproc != str(rank.local_size):
            raise RecipeError(
                f"nproc={nproc} but torchrun started {rank.local_size} here: leave nproc= out, "
                f"or set torchrun's --nproc_per_node={nproc}"
            )
        if max_restarts:
            raise RecipeError(
                "torchrun started these ranks, and starts them again: leave max_restarts= out, and "
                f"set torchrun's --max-restarts={max_restarts}"
            )
        check_meeting(rank)
        nodes = read_elastic_nodes()
        if nodes and (recipe.output is None or recipe.resume is None):
            raise RecipeError(
                f"torchrun --nnodes={nodes} starts ranks again whenever a machine joins or leaves: "
                "name the folder in which they go on, output=runs/elastic resume=auto"
            )
        launch = Launch(rank.local_size)
        size = rank.size
    else:
        launch = choose_launch(os.environ, nproc, recipe)
        size = launch.size
    machines = size // launch.nproc
    check_processes(recipe, size, machines)
    if (
        size > 1
        and recipe.traits.exchanges == "gradients"
        and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    ):
        raise SetupError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes torch's DistributedDataParallel with a "
            "segmentation fault: set TORCH_DISTRIBUTED_DEBUG=INFO"
        )
    assign_devices(recipe, launch.nproc, resources.count_requested_cuda(recipe), machines)
    if rank.launched or (size == 1 and not max_restarts):
        return None
    return launch


def wants_children(recipe: Recipe, nproc: str | None) -> bool:
    """Return whether the Python API must start ranks in child processes for this recipe.

    Raises:
        RecipeError: another task of this node starts the ranks.
    """
    if launch_to_start(recipe, nproc) is None:
        return False
    task = task_of_node(os.environ)
    if task:
        raise RecipeError(
            f"this is task {task} of its node, where task 0 starts all ranks: start one task per "
            "node"
        )
    return True


def check_plugin(name: object) -> None:
    """Raise RecipeError if a Python program passed a value that is not a string."""
    if not isinstance(name, str | None):
        raise RecipeError(
            f"plugin= is a module's name, as in plugin='my_module', not {type(name).__name__}"
        )


def load_plugin(name: str | None) -> None:
    """Import the user's module, which registers models and data sets.

    The working folder is searched first.

    Raises:
        RecipeError: there is no such module, or it imports one that is not installed.
    """
    check_plugin(name)
    if not name:
        return
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            hint = ""
            if name.endswith(".py"):
                hint = f" (write plugin={name.removesuffix('.py')}, without .py)"
            raise RecipeError(
                f"plugin={name}: no module of that name in {os.getcwd()} or installed{hint}"
            ) from None
        raise RecipeError(f"plugin={name} imports {error.name}, which is not installed") from None
    except (TypeError, ValueError) as error:
        raise RecipeError(f"plugin={name} is not a module's name: {error}") from None


def start(recipe: Recipe, words: Sequence[str], launch: Launch, max_restarts: int = 0) -> int:
    """Run `python -m trainer words...` under torch's launcher, within this process.

    If mpirun or srun started several tasks on this node, task 0 starts all ranks and the others
    exit.

    Args:
        recipe: recipe of the run.
        words: arguments of the command line.
        launch: number of ranks and nodes, from `launch_to_start`.
        max_restarts: maximum number of restarts of all ranks after a rank was lost. A rank that
            reports an error of its own causes no restart, because it would fail again. Restarts
            with smaller micro-batches, after memory ran out, do not count.

    Returns:
        0 if all ranks succeeded, or else the exit code of the first cause, whose line has been
            printed.
    """
    task = task_of_node(os.environ)
    if task:
        endings.say(
            f"task {task} of this node exits; task 0 starts all {launch.nproc} ranks here", 0
        )
        return 0
    if bound_by_mpi(os.environ):
        # mpirun may have bound this task to some of the cores, and all ranks of the node would
        # inherit this binding. Use the cores that the parent process may use instead.
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    # Set OMP_NUM_THREADS here. Otherwise torchrun sets it to 1, and ranks cannot tell whether the
    # user has chosen this 1.
    threads = resources.choose_threads(recipe, launch.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    start_server()
    log_level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    # torch reads the level when it is imported. At the default level, it prints pages of stacks if
    # nodes do not connect.
    os.environ["TORCH_CPP_LOG_LEVEL"] = log_level or "FATAL"
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if not log_level:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    arguments = [
        f"--nproc_per_node={launch.nproc}",
        f"--nnodes={launch.nnodes}",
        "--max_restarts=0",
        f"--rdzv_conf=timeout={math.ceil(recipe.timeout)}",
    ]
    if launch.nnodes == 1:
        arguments += [
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=127.0.0.1:0",
            "--local_addr=127.0.0.1",
        ]
    else:
        arguments += ["--rdzv_backend=static", f"--node_rank={launch.node_rank}"]
        arguments += [f"--master_addr={launch.master_addr}", f"--master_port={launch.master_port}"]
    # torch logs 30 lines about a failed rank, which would hide our one-line message.
    logging.disable()
    # A timer thread of torch's rendezvous may drop the last reference to its timer, and then tries
    # to join itself. The resulting error is harmless, so it is not printed.
    show = sys.unraisablehook
    sys.unraisablehook = lambda error: (
        None if "cannot join current thread" in str(error.exc_value) else show(error)
    )
    if "--shutdown-timeout" in run.get_args_parser()._option_string_actions:
        # Set the variable instead of the option `--shutdown-timeout`, because ranks read it too.
        seconds = math.ceil(recipe.grace + interrupts.SAVE_SECONDS)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(seconds))
    # torch replaces our handlers of the signals in this list, so the list has only SIGQUIT.
    arguments.append("--signals-to-handle=SIGQUIT")
    try:
        with passing_signals_on():
            restarts = 0
            lost = 0
            out_of_memory_at = -math.inf
            while True:
                ending = _attempt(arguments, words, launch, recipe.timeout, restarts)
                if ending is None:
                    return 0
                may_fit_in_smaller_batches = (
                    SMALLER in ending.line
                    and launch.nnodes == 1
                    and time.monotonic() - out_of_memory_at > SMALLER_AFTER
                )
                if may_fit_in_smaller_batches:
                    out_of_memory_at = time.monotonic()
                    line = ending.line.partition("; type ")[0]
                    how = "from the newest checkpoint, with more micro-batches"
                elif ending.code == PeerError.code and lost < max_restarts:
                    lost += 1
                    line = ending.line
                    how = f"{lost} of {max_restarts} times"
                else:
                    endings.say(ending.line, ending.code)
                    return ending.code
                restarts += 1
                endings.say(f"{line}; starting again, {how}", 0)
    except SignalException as stopped:
        # The signal came while no rank was running.
        code = interrupts.exit_code(stopped.sigval)
        endings.say(f"stopped by {stopped.sigval.name}", code)
        return code
    finally:
        fork_server.stop_server()


@contextmanager
def passing_signals_on() -> Iterator[None]:
    """Stop the ranks at the first signal, and kill them at the user's second Ctrl-C.

    torch's own handler is not used, because it raises an exception at every signal. At the second
    signal, the ranks receive SIGTERM. At the third, the launcher exits and kills ranks that are
    still saving. After this block, signals are ignored, because the process is about to exit.

    Raises:
        SignalException: the first signal arrived. The exception is torch's.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    class Stop(SignalException):
        """Exception for torch, raised again until torch reads `sigval`."""

        @property
        def sigval(self) -> signal.Signals:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # torch sends the returned signal to the ranks. They treat every stop signal except
            # SIGINT like SIGTERM.
            if ctrl_c.first == signal.SIGINT:
                return signal.SIGINT
            return signal.SIGTERM

        @sigval.setter
        def sigval(self, value: signal.Signals) -> None:
            pass

    ctrl_c = early.CtrlC(interrupts.ctrl_c_routes())

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = ctrl_c.first is None
        if ctrl_c.is_second(number) or number == interrupts.SECOND_CTRL_C:
            for rank in multiprocessing.active_children():
                rank.kill()
        elif is_first or number == signal.SIGALRM:
            # The interrupted code may catch this exception, and an exception in a callback is lost.
            # The timer then causes it to be raised again.
            signal.setitimer(signal.ITIMER_REAL, RERAISE_SECONDS)
            raise Stop("stopped by a signal", signal.SIGTERM)

    numbers = [*interrupts.stop_signals(), interrupts.SECOND_CTRL_C, signal.SIGALRM]
    for number in numbers:
        signal.signal(number, handle)
    # Ranks that see this variable leave the counting of Ctrl-C to this process.
    os.environ[family.PARENT] = str(os.getpid())
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def _attempt(
    arguments: Sequence[str], words: Sequence[str], launch: Launch, timeout: float, restarts: int
) -> Ending | None:
    """Run torch's launcher with forked ranks. Return None if every rank succeeded."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    # The server may have been killed since the last attempt.
    start_server()
    run_id = uuid.uuid4().hex if launch.nnodes == 1 else "trainer"
    with tempfile.TemporaryDirectory(prefix="trainer-") as logs:
        forked = [
            f"--rdzv_id={run_id}",
            "--start_method=forkserver",
            f"--log_dir={logs}",
            "trainer",
        ]
        config, *_ = run.config_from_args(run.parse_args([*arguments, *forked]))  # type: ignore[no-untyped-call]
        with explain_delay(lambda: _missing_nodes(launch, timeout, Path(logs))):
            launcher = elastic_launch(config, run_rank)
            environment = {**os.environ}
            return _ending(lambda: launcher(environment, restarts, *words), Path(logs), launch)


def _missing_nodes(launch: Launch, timeout: float, logs: Path) -> str:
    """Return a sentence that says which nodes this node waits for, and how to start them.

    The result is empty if there is only one node. It is also empty when the ranks of this node have
    been started, because all nodes are connected then.
    """
    if launch.nnodes == 1 or any(logs.glob("*/attempt_*")):
        return ""
    missing = [str(node) for node in range(launch.nnodes) if node != launch.node_rank]
    if len(missing) == 1:
        waits_for = "the other"
        which = missing[0]
    else:
        waits_for = "the others"
        which = f"one of {missing[0]} to {missing[-1]}"
    return (
        f"node {launch.node_rank} waits for {waits_for} of {launch.nnodes} nodes at "
        f"{launch.master_addr}:{launch.master_port}, {timeout:g} s at "
        f"most: start them with NODE_RANK={which} and the same MASTER_ADDR and MASTER_PORT"
    )


def _ending(torchrun: Callable[[], object], logs: Path, launch: Launch) -> Ending | None:
    """Run torch's launcher to its end. Return None if every rank succeeded."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    server_killed = Ending(0, PeerError.code, "the process that ranks are forked from was killed")
    try:
        torchrun()
    except (EOFError, ConnectionError):
        # The server died while it was asked to fork a rank.
        return server_killed
    except ChildFailedError as failed:
        failures = {}
        for rank, failure in failed.failures.items():
            if failure.exitcode == fork_server.SERVER_GONE_CODE:
                failures[rank] = server_killed
            else:
                failures[rank] = Ending(rank, failure.exitcode, "", failure.timestamp)
        # A rank's own report says more than the exit code that torch saw.
        failures |= endings.reports(logs)
        return endings.first_cause(failures.values())
    except SignalException as stopped:
        signalled = stopped.sigval
        # torch does not stop ranks that were being forked when the signal came, so stop them here.
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join(interrupts.IDLE_GRACE_SECONDS)
            child.kill()
        completed = [*logs.glob(f"*/attempt_*/*/{endings.COMPLETED}")]
        if len(completed) == launch.nproc:
            return None
        # torch's agent has sent the signal to the ranks and waited for them. A rank that could not
        # save reports another code.
        code = interrupts.exit_code(signalled)
        own_ending = Ending(sys.maxsize, code, f"stopped by {signalled.name}", time.time())
        reports = endings.reports(logs).values()
        causes = [end for end in reports if end.code != PeerError.code]
        return endings.first_cause([own_ending, *causes])
    except Exception as error:
        if not type(error).__name__.startswith(("Dist", "Rendezvous")):
            raise
        where = f"{launch.master_addr}:{launch.master_port}"
        reason = str(error).splitlines()[0]
        raise SetupError(f"the nodes cannot connect at {where}: {reason}") from None
    return None


def start_server() -> None:
    """Start the process from which ranks are forked. It imports torch while this process goes on.

    Libraries in that process see the environment variables that are set when it starts.
    """
    fork_server.start_server(MAIN, "trainer.training.loop", "torch.utils.tensorboard")


def run_rank(environment: Mapping[str, str], restarts: int, *words: str) -> None:
    """Run `python -u -m trainer words...` as a rank, in a forked process.

    If it fails, this process exits with its code.

    Args:
        environment: variables of the launcher. torch has already added those of the rank to this
            process.
        restarts: how often our launcher has restarted the ranks.
    """
    early.install_handlers()
    for name in environment.keys() - os.environ.keys():
        os.environ[name] = environment[name]
    os.environ[LAUNCHER] = environment[family.PARENT]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    # `faults` reads the environment only when it is imported.
    importlib.reload(faults)
    fork_server.begin_rank()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"{family.RANK_NAME}{os.environ['RANK']}")
    for stream in (sys.stdout, sys.stderr):
        # A program may have replaced a stream by another object.
        with suppress(AttributeError):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv[1:] = words
    importlib.import_module(MAIN).main()

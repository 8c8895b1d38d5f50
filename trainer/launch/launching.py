"""Where the ranks come from: this process, a torchrun that the user started, or one that we start.

There is one launcher, torch's own; `start` calls it within this process, so that the exit code and the line of the rank
that failed reach the user unchanged. Its ranks are forked, in milliseconds, from a server that has imported torch and
all of this once. Nothing here imports torch before it starts something.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.devices.assignment import assign_devices
from trainer.errors import PeerError, RecipeError, SetupError
from trainer.launch import endings
from trainer.launch.endings import SMALLER, SMALLER_AFTER, Ending
from trainer.launch.topology import Launch, bound_by_mpi, choose_launch, task_of_node
from trainer.processes import early, family, faults, fork_server, interrupts, resources
from trainer.processes.rank import LAUNCHER, check_meeting, elastic_nodes, place
from trainer.processes.terminal import explain_delay
from trainer.recipe import Recipe
from trainer.recipe.checks import check_loggers, check_processes

MAIN = "trainer.__main__"
EXACT = "TRAINER_EXACT"  # for runs whose losses are compared: see randomness


def launch_to_start(recipe: Recipe, nproc: str | None = None, max_restarts: int = 0) -> Launch | None:
    """Check a recipe against processes and devices before anything heavy starts.

    Gives what to `start`, or None when this process trains: it is a rank already, or the only one, to be started once.
    Raises RecipeError where it cannot run like this, and SetupError where a logger is missing or ranks cannot meet.
    """
    check_loggers(recipe)
    rank = place()
    if rank.launched:
        if nproc is not None and nproc != str(rank.local_size):
            raise RecipeError(
                f"nproc={nproc} but torchrun started {rank.local_size} here: leave nproc= out, "
                f"or type torchrun --nproc_per_node={nproc}"
            )
        if max_restarts:
            raise RecipeError(
                f"torchrun started these ranks, and starts them again: leave max_restarts= out, and type "
                f"torchrun --max-restarts={max_restarts}"
            )
        check_meeting(rank)
        if (nodes := elastic_nodes()) and (recipe.output is None or recipe.resume is None):
            raise RecipeError(
                f"torchrun --nnodes={nodes} starts ranks again whenever a machine joins or leaves: name the folder in "
                "which they go on, output=runs/elastic resume=auto"
            )
        launch, size = Launch(rank.local_size), rank.size
    else:
        launch = choose_launch(os.environ, nproc, recipe, resources.cuda_count, resources.cores())
        size = launch.size
    machines = size // launch.nproc
    check_processes(recipe, size, machines)
    if size > 1 and recipe.traits.exchanges == "gradients" and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        raise SetupError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch's DistributedDataParallel ends by a segmentation fault with it: "
            "set TORCH_DISTRIBUTED_DEBUG=INFO"
        )
    assign_devices(recipe, launch.nproc, resources.cuda_wanted(recipe), machines)
    return None if rank.launched or (size == 1 and not max_restarts) else launch


def wants_children(recipe: Recipe, nproc: str | None = None) -> bool:
    """Whether the Python API has to start torchrun for this recipe here, and no other task of this node does."""
    wanted = launch_to_start(recipe, nproc) is not None
    if wanted and (task := task_of_node(os.environ)):
        raise RecipeError(f"this is task {task} of its node, where task 0 starts all ranks: start one task per node")
    return wanted


def check_plugin(name: object) -> None:
    """Raises RecipeError where a program gave something else than text."""
    if not isinstance(name, str | None):
        raise RecipeError(f"plugin= is a module's name, as in plugin='my_module', not {type(name).__name__}")


def load_plugin(name: str | None) -> None:
    """Import the user's own module, which registers models and data sets; the working folder comes first.

    Raises:
        RecipeError: there is no such module.
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
            hint = f" (write plugin={name.removesuffix('.py')}, without .py)" if name.endswith(".py") else ""
            raise RecipeError(f"plugin={name}: no module of that name in {os.getcwd()} or installed{hint}") from None
        raise RecipeError(f"plugin={name} imports {error.name}, which is not installed") from None
    except (TypeError, ValueError) as error:
        raise RecipeError(f"plugin={name} is not a module's name: {error}") from None


def start(recipe: Recipe, words: Sequence[str], launch: Launch, max_restarts: int = 0) -> int:
    """Run `python -m trainer words...` under torchrun, within this process; of a node's tasks only the first one does.

    Args:
        max_restarts: how often all ranks are started again when one was lost. What a rank says that it failed of would
            fail again.

    Returns:
        0, or the exit code of the rank that failed first, after printing its line.
    """
    if task := task_of_node(os.environ):
        endings.say(f"task {task} of this node exits; task 0 starts all {launch.nproc} ranks here", 0)
        return 0
    if bound_by_mpi(os.environ):
        with suppress(OSError):  # the ranks of all tasks start from this one
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    # torchrun would set 1, which could not be distinguished from the user's own 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(resources.threads_per_process(recipe, launch.nproc)))
    start_server()
    loud = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = loud or "FATAL"  # read once, here: pages of stack for nodes that do not meet
    from torch.distributed import run

    if not loud:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    arguments = [f"--nproc_per_node={launch.nproc}", f"--nnodes={launch.nnodes}", "--max_restarts=0"]
    arguments += [f"--rdzv_conf=timeout={math.ceil(recipe.timeout)}"]
    if launch.nnodes == 1:
        arguments += ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1"]
    else:
        arguments += ["--rdzv_backend=static", f"--node_rank={launch.node_rank}"]
        arguments += [f"--master_addr={launch.master_addr}", f"--master_port={launch.master_port}"]
    os.environ[family.PARENT] = str(os.getpid())
    for name in ("torch.distributed", "torch.multiprocessing"):  # whose 30 lines a failure would bury our one
        quiet = logging.getLogger(name)
        quiet.propagate, quiet.handlers = False, [logging.NullHandler()]
    show = sys.unraisablehook  # the thread of torch's rendezvous may hold its last reference, and try to join itself
    sys.unraisablehook = lambda error: None if "cannot join current thread" in str(error.exc_value) else show(error)
    interrupts.raise_at_ctrl_c()
    passed_on = interrupts.ALWAYS + interrupts.IF_UNUSED
    handlers = {number: signal.getsignal(number) for number in passed_on}
    for number in interrupts.IF_UNUSED:  # as SIGTERM, which loader workers get too; under nohup SIGHUP is ignored
        if early.unused(number):
            signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if "--shutdown-timeout" in run.get_args_parser()._option_string_actions:  # the ranks read it too
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(recipe.grace + interrupts.SAVING)))
    arguments.append("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT")
    try:
        restarts = lost = 0
        since = -math.inf  # when memory ran out before
        while True:
            ending = _attempt(arguments, words, launch, recipe.timeout, restarts)
            if ending is None:
                return 0
            short = SMALLER in ending.line and launch.nnodes == 1 and time.monotonic() - since > SMALLER_AFTER
            if not short and (ending.code != PeerError.code or lost == max_restarts):
                endings.say(ending.line, ending.code)
                return ending.code
            restarts, lost, since = restarts + 1, lost + (not short), time.monotonic() if short else since
            line = ending.line.partition("; type ")[0] if short else ending.line
            how = "from the newest checkpoint, in more pieces" if short else f"{lost} of {max_restarts} times"
            endings.say(f"{line}; starting again, {how}", 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _attempt(
    arguments: Sequence[str], words: Sequence[str], launch: Launch, timeout: float, restarts: int
) -> Ending | None:
    """torchrun, but that its ranks are forked; None when every rank ended well."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    start_server()  # again, where it was killed
    with tempfile.TemporaryDirectory(prefix="trainer-") as logs:
        meeting = uuid.uuid4().hex if launch.nnodes == 1 else "trainer"
        forked = [f"--rdzv_id={meeting}", "--start_method=forkserver", f"--log_dir={logs}", "trainer"]
        config, *_ = run.config_from_args(run.parse_args([*arguments, *forked]))  # type: ignore[no-untyped-call]
        with explain_delay(lambda: _missing_nodes(launch, timeout, Path(logs))):
            launcher = elastic_launch(config, run_rank)
            return _ending(lambda: launcher({**os.environ}, restarts, *words), Path(logs), launch)


def _missing_nodes(launch: Launch, timeout: float, logs: Path) -> str:
    """What this node waits for; empty once its ranks are started, for then all nodes have met."""
    if launch.nnodes == 1 or any(logs.glob("*/attempt_*")):
        return ""
    others = [str(node) for node in range(launch.nnodes) if node != launch.node_rank]
    which = others[0] if len(others) == 1 else f"one of {others[0]} to {others[-1]}"
    return (
        f"node {launch.node_rank} waits for the other{'s' * (launch.nnodes > 2)} of {launch.nnodes} nodes at "
        f"{launch.master_addr}:{launch.master_port}, {timeout:g} s at most: start them with NODE_RANK={which} and the "
        "same MASTER_ADDR and MASTER_PORT"
    )


def _ending(torchrun: Callable[[], object], logs: Path, launch: Launch) -> Ending | None:
    """Run to the end; None when every rank ended well."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    server_killed = Ending(0, PeerError.code, "the process that ranks are forked from was killed")
    try:
        with interrupts.block_sigint_in_children():
            torchrun()
    except (EOFError, ConnectionError):  # as it was to fork one
        return server_killed
    except ChildFailedError as failed:
        seen = {
            rank: server_killed if end.exitcode == fork_server.GONE else Ending(rank, end.exitcode, "", end.timestamp)
            for rank, end in failed.failures.items()
        }
        return endings.first_cause((seen | endings.reports(logs)).values())
    except SignalException as stopped:
        children = multiprocessing.active_children()  # forked as it came, torch does not know of them yet
        for child in children:
            child.terminate()
        for child in children:
            child.join(interrupts.PROMPT)
            child.kill()
        # The agent has passed the signal on and waited. A rank that could not save ends with another code.
        code = interrupts.exit_code(stopped.sigval)
        ours = Ending(sys.maxsize, code, f"stopped by {stopped.sigval.name}", time.time())
        others = [end for end in endings.reports(logs).values() if end.code != PeerError.code]
        return endings.first_cause([ours, *others])
    except Exception as error:
        if not type(error).__name__.startswith(("Dist", "Rendezvous")):
            raise
        where = f"{launch.master_addr}:{launch.master_port}"
        raise SetupError(f"the nodes cannot connect at {where}: {str(error).splitlines()[0]}") from None
    return None


def start_server() -> None:
    """Start the server, which imports beside this process. Its libraries see the environment as it is now."""
    fork_server.context(MAIN, "trainer.training.loop", "torch.utils.tensorboard")


def run_rank(environment: Mapping[str, str], restarts: int, *words: str) -> None:
    """Be a rank, as `python -u -m trainer words...` is. Where that fails this process ends with its exit code.

    Args:
        environment: the launcher's, to which torch's launcher has added what makes this a rank.
        restarts: how often our launcher has started these ranks again.
    """
    early.install_handlers()
    for name in environment.keys() - os.environ.keys():
        os.environ[name] = environment[name]
    os.environ[LAUNCHER] = environment[family.PARENT]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    importlib.reload(faults)  # which looks at the environment once
    fork_server.begin_rank()
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"{family.RANK_NAME}{os.environ['RANK']}")
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(write_through=True)
    sys.argv[1:] = words
    importlib.import_module(MAIN).main()

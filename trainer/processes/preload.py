"""What the fork server imports first: it dies with the process that started it, and what it forks dies with it.

By itself it would notice only when it has imported everything, and when all its children have noticed.
"""

import atexit
import os

from trainer.processes import family, fork_server
from trainer.processes.interrupts import exit_now

server = os.getpid()
# Its children live until it is gone, and with torch the interpreter's shutdown takes seconds.
atexit.register(lambda: exit_now(0) if os.getpid() == server else None)
os.environ.pop(fork_server.SAFE, None)  # of what the children start
parent = os.environ.pop(fork_server.SERVED, "")
if parent:
    family.die_with_parent(int(parent))
    os.register_at_fork(after_in_child=lambda: family.die_with_parent(server))

"""What the fork server imports first: it dies with the process that started it, and what it forks dies with it.

By itself it would notice only when it has imported everything, and when all its children have noticed.
"""

import os

from trainer.processes import family, fork_server

parent = os.environ.pop(fork_server.SERVED, "")
if parent:
    family.die_with_parent(int(parent))
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: family.die_with_parent(server))

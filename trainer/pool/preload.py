"""What the fork server imports before it forks: torch, so that a worker starts in a tenth of a second.

Importing torch starts no thread that a fork could lose (OpenMP's and CUDA's start at first use, in the worker).
"""

import signal

import torch  # noqa: F401

import trainer.pool.worker  # noqa: F401

# The server was started with SIGINT blocked, so that Ctrl-C does not stop it half way. It ignores it from here on.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

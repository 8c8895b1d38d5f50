"""Isolate training from the torch context of the user's program: modes, flags and defaults."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def _without_raising() -> Iterator[None]:
    """In this block, print the warnings that the caller's filters would raise as errors.

    Filters with other actions are kept.
    """
    filters: list[Any] = [*warnings.filters]
    with warnings.catch_warnings():
        # The caller's first filter is added last, because each call inserts a filter at the front
        # and the first filter that matches is used.
        for action, message, category, module, line in reversed(filters):
            # A filter contains strings if Python's start-up created it, else compiled patterns.
            patterns = [str(getattr(part, "pattern", part or "")) for part in (message, module)]
            shown: Any = "default" if action == "error" else action
            warnings.filterwarnings(shown, patterns[0], category, patterns[1], line)
        yield


@contextmanager
def plain_context() -> Iterator[None]:
    """Run this block outside of the caller's torch context.

    The block runs without autocast, `no_grad`, `inference_mode`, `torch.device(...)` as a context,
    `set_default_device`, other function and dispatch modes, anomaly detection, and filters that
    turn warnings into errors. The default dtype is float32, and CUDA work is issued to the default
    stream.
    """
    with ExitStack() as stack:
        # Function modes are left first, because they could change each call below.
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        contexts: list[Any] = [
            _disable_current_modes(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
        ]
        if any(action == "error" for action, *_ in warnings.filters):
            stack.enter_context(_without_raising())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The block uses the default stream, and may need results of the caller's stream.
            torch.cuda.current_stream().synchronize()
            contexts.append(torch.cuda.stream(torch.cuda.default_stream()))
        for context in contexts:
            stack.enter_context(context)
        # The default dtype is shared by all threads, so it is changed only if necessary.
        if torch.get_default_dtype() != torch.float32:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        yield

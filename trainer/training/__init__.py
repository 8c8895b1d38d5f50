"""The training loop of every mode, and what it calls: setup, steps, evaluation, resuming, reports.

Start with `loop`, then `setup`. What differs between modes is in `modes`.

Imports: errors, versions, recipe, devices, tasks, memory, processes, distributed, saving, launch,
models, telemetry, data, modes, optim.
"""

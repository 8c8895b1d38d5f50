"""The loop of every mode (`loop` reads on one screen) and what it calls: optimizer, evaluation, resuming, reports.

What differs between modes is in `modes`.
Imports: errors, recipe, devices, tasks, processes, saving, launch, models, telemetry, data, modes, optim.
"""

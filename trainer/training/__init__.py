"""The loop of every mode (`loop` reads on one screen) and what it calls: optimizer, evaluation, resuming, reports.

What differs between modes is in `modes`.
Imports: errors, recipe, devices, processes, saving, tasks, data, launch, models, telemetry, caching, modes.
"""

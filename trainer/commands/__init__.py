"""The commands, one room each; what they do to a run they do through the steps of `training`.

Imports: errors, recipe, devices, tasks, processes, pool, saving, launch, models, telemetry, data, modes, optim,
training.
"""

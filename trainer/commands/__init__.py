"""The commands, one module or package each; they run a model through the steps of `training`.

Imports: errors, versions, recipe, devices, tasks, memory, processes, distributed, pool, saving,
launch, models, telemetry, data, modes, optim, training.
"""

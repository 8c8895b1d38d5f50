"""From gradients to weights: optimizers, schedule, fp16 scaling, moving average, roles of parameters.

Imports: errors, recipe, models, modes.
"""

"""Optimizers, learning rate schedule, fp16 loss scaling, moving average, and parameter roles.

Imports: errors, recipe, models.
"""

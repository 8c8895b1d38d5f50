"""The devices of this machine: detecting GPUs, their health, a recipe's device list, precision.

Nothing here starts a process or knows a mode.
Imports: errors, versions, recipe.
"""

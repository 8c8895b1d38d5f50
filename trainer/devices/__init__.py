"""What this machine computes on: first contact with its cards, their health, a recipe's device list, precision.

Nothing here starts a process or knows a mode.
Imports: errors, recipe.
"""

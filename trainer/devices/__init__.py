"""What this machine computes on: first contact with its cards, a recipe's device list, precision on them.

Nothing here starts a process or knows a mode.
Imports: errors, recipe.
"""

"""Models by name, their graphs, where they can be cut, and how their stages are balanced.

Modes run the stages.
Imports: devices, errors, recipe, saving, tasks.
"""

"""Models by name, their graphs, where they can be cut, and how their stages are balanced.

Subpackage `modes` runs the stages.
Imports: errors, recipe, devices, tasks, memory, saving.
"""

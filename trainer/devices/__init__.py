"""Devices of this machine: detection and health of GPUs, assignment to processes, precision.

No module of this package starts a process.
Imports: errors, versions, recipe.
"""

"""Processes: rank and resources of this process, parents and children, signals, shared memory, the
fork server, and the terminal.

The package `distributed` contains the communication between ranks, and `launch` starts them.
Imports: errors, recipe, devices.
"""

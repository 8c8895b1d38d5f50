"""Processes and what they share: this rank's world, its parents, peers and children, memory, signals, the fork server,
faults.

Who starts the ranks is in `launch`; what they compute is no matter here.
Imports: errors, recipe, devices.
"""

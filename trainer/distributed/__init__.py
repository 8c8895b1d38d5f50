"""Communication between ranks: the `World` of a rank, process groups, collectives and their errors.

The package `launch` starts the ranks, and `modes` decides what they exchange.
Imports: errors, recipe, devices, processes.
"""

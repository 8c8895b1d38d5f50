"""Measurements and output of a run: clocks, FLOPs, slow ranks, TensorBoard, verdict, plots.

This package measures and reports. Other packages act on the results.
Imports: errors, recipe, devices, processes, saving.
"""

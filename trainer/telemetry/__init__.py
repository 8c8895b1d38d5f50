"""Measurements and output of a run: clocks, FLOPs, memory, TensorBoard, steps.csv, verdict, plots.

This package measures and shows; decisions are made elsewhere.
Imports: errors, recipe, devices, processes, saving.
"""

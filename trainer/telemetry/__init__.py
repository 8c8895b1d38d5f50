"""What a run tells: clocks, FLOPs and memory, TensorBoard and steps.csv, the verdict, plots.

It measures and shows; it decides nothing.
Imports: errors, recipe, devices, processes, saving.
"""

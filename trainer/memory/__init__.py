"""Memory of passes, runs and devices: measured while a run trains, or predicted before it starts.

`measuring` measures the memory of a forward and backward pass, also with tensors on the meta
device. `needs` computes the memory of several passes, or of the shards of a model. `device` reads
the free memory and the peak of a device. `prediction` predicts the memory of a planned run on each
of its devices.
Imports: errors, versions, recipe, devices.
"""

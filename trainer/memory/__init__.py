"""Memory of a pass, a run and a device, measured while a run trains or predicted before it starts.

`measuring` measures a pass, also with tensors on the meta device. `needs` computes what several
passes or shards add up to. `device` reads the free memory and the peak of a device. `prediction`
computes the memory of a planned run on each of its devices.
Imports: errors, versions, recipe, devices.
"""

"""Files of a run: the run folder, checkpoints that survive a kill, weights files, the journal,
and locks on folders.

The package handles files and named tensors. It knows neither models nor modes.
Imports: errors, recipe, processes.
"""

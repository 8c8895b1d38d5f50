"""What outlives a run: the run folder, checkpoints that a kill cannot tear, files on disks that fill, locks on folders.

Only files and tensors by name; no model and no mode.
Imports: errors, recipe, processes.
"""

"""Start ranks: this process alone, ranks of the user's torchrun, or ranks that we start.

Nothing here imports torch before ranks are started.
Imports: errors, recipe, devices, processes, saving.
"""

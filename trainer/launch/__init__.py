"""Where the ranks come from: this process, a torchrun that the user started, or one that we start.

No torch before something is started.
Imports: errors, recipe, devices, processes, saving.
"""

"""Start the ranks of a run.

The ranks are this process alone, those that the user's torchrun has started, or ranks that this
package starts. The package does not import torch before it starts them.

Imports: errors, recipe, devices, processes, saving.
"""

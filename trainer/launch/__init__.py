"""Start the ranks of a run.

The ranks are this process alone, those that the user's torchrun has started, or ranks that this
package starts. The package imports torch only when it is about to start ranks.

Imports: errors, recipe, devices, processes, saving.
"""

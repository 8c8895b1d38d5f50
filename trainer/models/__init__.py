"""Models by name, their graphs, where they can be cut, and how their stages are balanced.

How a cut model is run is a mode's.
Imports: errors, recipe, saving.
"""

"""What people type: their words turned into ours or answered with what to type, help pages, completion.

No torch in this room, so that a typo is answered at once.
Imports: errors, recipe, processes.
"""

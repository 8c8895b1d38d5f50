"""The command line: its commands, words, help pages and completion.

No torch in this room, so that a typo is answered at once.
Imports: errors, recipe, processes, saving.
"""

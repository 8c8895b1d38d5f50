"""The command line: its words, corrections of mistakes, help pages, completion.

No torch in this room, so that a typo is answered at once.
Imports: errors, recipe, processes.
"""

"""Other programs' words, and slips: what a word says in ours.

Read by `cli` alone: `other_values` is the table, `interpreter` reads it.
"""

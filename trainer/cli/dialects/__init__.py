"""Other programs' words, and slips: what a word says in ours.

Read by `cli` alone: each file looks at one kind of word.
"""

"""Photos: from a file to pixels of the right size, and back to a picture for people.

A loader's workers do this, `data.cache` does it beforehand.
"""

"""Photos: from a file to pixels of the right size, and back to a picture for people.

The workers of a loader use this package, and `data.cache` uses it in advance.
"""

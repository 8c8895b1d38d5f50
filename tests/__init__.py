"""Tests of `trainer`.

This file makes `tests` a regular package, which Python prefers to any other folder `tests`. Folders
below need no such file.
"""

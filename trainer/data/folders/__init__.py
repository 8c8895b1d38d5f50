"""Folders of photos: how they are laid out, what lies in them, and tables of their labels.

From a path to names of files and their targets; no image is read here.
"""

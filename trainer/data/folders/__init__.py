"""Folders of photos: their layout, the images in them, and tables of labels.

The modules convert the path of a directory to names of files and their targets.
"""

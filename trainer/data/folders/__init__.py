"""Folders of photos: their layout, the images in them, and tables of labels.

The modules of this package convert the path of a directory to file names and targets.
"""

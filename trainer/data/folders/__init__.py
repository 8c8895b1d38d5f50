"""Folders of photos: their layout, the images in them, and tables of their labels.

From a path to names of files and their targets; no image is decoded here.
"""

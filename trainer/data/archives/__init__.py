"""Shards: files of many encoded images each, tar or Parquet, read in place and in any order.

Decoding and augmentation are the same as for images in a file each.
"""

"""Shards: files of many encoded images each, tar or Parquet, read in place and in any order.

Not how images are decoded or varied: that is the same as for a file each.
"""

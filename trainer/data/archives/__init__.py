"""Shards: tar or Parquet files that contain many encoded images each.

Images are read from the shards in any order, without unpacking. Decoding and augmentation are the
same as for images in separate files.
"""

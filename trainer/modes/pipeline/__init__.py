"""A model cut over devices: its stages, run in one process over streams or by ranks under torch's schedules.

Where to cut is asked of `models`.
Imports: what `modes` may.
"""

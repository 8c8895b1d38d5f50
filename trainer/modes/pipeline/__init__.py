"""Stages of a model on several devices, in one process or in several processes.

One process overlaps stages by CUDA streams, and several processes by torch's schedules. The package
`models` finds the positions where a model can be cut.
Imports: the same as `modes`.
"""

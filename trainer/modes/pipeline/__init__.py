"""Stages of a model on several devices, in one process or in several processes.

A single process overlaps stages with CUDA streams, and several processes use torch's schedules. The
package `models` finds the positions where a model can be cut.
Imports: the same as `modes`.
"""

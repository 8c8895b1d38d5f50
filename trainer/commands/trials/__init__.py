"""Trials in fresh processes, and their reports.

Shared by `compare`, `sweep`, `prove` and `plan measured=here`. A command says which trials there
are and what their results mean.
"""

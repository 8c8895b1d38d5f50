"""Trials in fresh processes, and their reports.

`compare`, `sweep`, `prove`, `doctor` and `plan measured=here` share this package. A command says
which trials or measurements there are and what their results mean.
"""

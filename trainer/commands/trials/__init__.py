"""What `compare`, `sweep`, `prove` and `plan measured=here` share: trials in fresh processes, and one way to report.

A command says which trials there are and what their results mean.
"""

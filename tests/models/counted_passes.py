"""A module whose only user imports it inside of a function."""

passes = 0

"""The command line: commands, arguments, help pages and completion.

Nothing here imports torch, so that a typo is reported immediately.
Imports: errors, recipe, processes, saving, telemetry.
"""

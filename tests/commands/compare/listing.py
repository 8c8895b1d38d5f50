"""Entries on a small model, as words give them."""

from __future__ import annotations

from trainer.commands.compare import entries
from trainer.commands.compare.entries import parse_sweep

SMALL = ["model.name=cnn_gn", "devices=[cpu,cpu]", "batch_size=32", "optimizer.lr=0.01"]


def listed(*words, modes=None, sweep=None, **options):
    found = entries.entries("digits", [*SMALL, *words], modes, parse_sweep(sweep) if sweep else None, **options)
    return {entry.name: entry for entry in found}

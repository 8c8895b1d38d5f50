"""Entries on a small model, as words give them."""

from __future__ import annotations

from trainer.commands.compare import entries

SMALL = ["model.name=cnn_gn", "devices=[cpu,cpu]", "batch_size=32", "optimizer.lr=0.01"]


def listed(*words, modes=None, **options):
    return {entry.name: entry for entry in entries.entries("digits", [*SMALL, *words], modes, **options)}

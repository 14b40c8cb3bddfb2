"""How positions are divided among the programs of an attention kernel."""

TILE = 64
"""Positions per program."""

"""Checkpoint bytes: names, formats, slices."""

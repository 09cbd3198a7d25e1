"""Checkpoint tools behind the command line: shape presets, a maker of random checkpoints, an inspector."""

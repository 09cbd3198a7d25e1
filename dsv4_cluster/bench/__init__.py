"""Measurements: of the engine in this process, and of a served endpoint under load."""

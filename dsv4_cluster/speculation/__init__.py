"""Drafting tokens ahead of the main model and checking them against what it samples."""

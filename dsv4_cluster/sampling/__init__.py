"""Logits to tokens and log-probabilities."""

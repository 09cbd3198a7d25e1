"""Noise, top-p and token choice on logits."""

"""The network. Reads like the paper; each forward fits a screen."""

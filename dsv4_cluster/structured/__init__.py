"""Grammars: what an answer may look like, as masks over token ids. Free of torch, so that the front end can check."""

"""Nouns that cross a process boundary: frozen, picklable, free of torch and ray."""

"""The inference engine of one rank: synchronous, one thread, no I/O."""

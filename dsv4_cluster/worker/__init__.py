"""Actors around the engine: one per rank, the gang of a replica, and the bridge from the step loop to asyncio."""

"""Checkpoint bytes: names, formats, slices.

`inventory` lists every tensor of the official format with its shard rule. `reader.Checkpoint` opens a directory in any
known format and reads dequantised slices by official name. `writer.ShardedWriter` writes shards, `dummy` fills them
with random weights. Nothing here knows the network; the model asks for what it wants by name.
"""

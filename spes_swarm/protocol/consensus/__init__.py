"""The reference: the parameters that the swarm agrees on, block by block.

Start with `layout` (where each parameter lies in the flat vector), then `reference` (versions, digests, chunks).
"""

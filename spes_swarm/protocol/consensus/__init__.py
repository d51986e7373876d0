"""The reference: the parameters that the swarm agrees on, block by block.

Begin with `layout` (which parameter lies where in the flat vector), then `reference` (versions, digests, chunks).
"""

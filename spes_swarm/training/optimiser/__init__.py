"""The optimisers of a peer, with their moments on the device or in host memory.

Start with `registry`. Checkpoints do not depend on where the moments are.
"""

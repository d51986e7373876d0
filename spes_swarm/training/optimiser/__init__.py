"""The optimisers of a peer, with their moments on the device or in host memory.

Start with `registry`. Checkpoints and other peers do not depend on where the moments are.
"""

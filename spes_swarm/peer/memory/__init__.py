"""What fits into the memory of a peer: bytes by class, a step, and the settings that follow.

Start with `capacity`.
"""

"""Where a peer keeps the experts that others train: on its device, or in host memory.

Start with `storage`. `prefetch` copies the next layer to the device while the current one computes.
"""

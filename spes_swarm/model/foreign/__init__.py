"""Where a peer keeps the experts that others train: on its device, in host memory, in files, or divided among ranks.

Start with `storage`. `shares` divides experts among the ranks of a peer, and `prefetch` copies the next layer to the
device while the current one computes.
"""

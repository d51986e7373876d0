"""Where a peer keeps the experts that others train: on its device, in host memory, or in files.

`storage` lists the places, and `prefetch` brings the next layer to the device while the present one computes.
"""

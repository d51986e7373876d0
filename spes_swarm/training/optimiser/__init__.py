"""The optimisers of a peer, with their moments on the device, in 8 bits or in host memory.

Start with `registry`; `moment_storage` has the forms of moments. Whatever the form, checkpoints and other peers see
fp32.
"""

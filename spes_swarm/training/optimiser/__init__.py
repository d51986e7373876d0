"""AdamW of a peer, with its moments on the device, in 8 bits or in host memory.

Start with `adamw`; `moment_storage` has the forms of moments. Whatever the form, checkpoints and other peers see fp32.
"""

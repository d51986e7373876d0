"""The network below everything else: this peer's libp2p daemon (p2pd), and calls and streams through it.

Start with `interface`, which is all that rounds and transfers need; `libp2p` implements it.
"""

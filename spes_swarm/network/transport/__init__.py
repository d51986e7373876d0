"""The network below everything else: this peer's libp2p daemon (p2pd), and calls and streams through it.

No other package imports hivemind. Start with `interface`, which is all that rounds and transfers need; `libp2p`
implements it, `dht` has the records' node, and `hivemind_changes` all that is changed in hivemind.
"""

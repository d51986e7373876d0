"""What every other package may use, and what knows nothing of the swarm: errors, wording, addresses, strict settings.

Imports nothing of spes_swarm, and neither hivemind nor torch nor transformers. Begin with `errors`: the whole tree.
"""

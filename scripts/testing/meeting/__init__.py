"""Checks of the machine that forms the group of a round (spes_swarm/protocol/meeting) on a virtual clock.

- `parts`      statements and groups without signatures
- `walks`      random walks of a whole swarm, with faults and hostile members
- `search`     all interleavings of one round of two or three peers with a few faults
- `mutations`  the machine without one of its statements: is that noticed?

`python -m scripts.model_check` is their command line.
"""

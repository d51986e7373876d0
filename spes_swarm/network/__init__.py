"""The network process: everything of a peer that talks to other peers.

Imports `base`, `protocol`, `config` and `port`.

- `link`      connections: p2pd, framed streams, calls, the DHT, the swarm's time, reachability and relays
- `round`     rendezvous, and the exchange of a round
- `transfer`  the reference and moments of experts, from peer to peer

Begin with `services`: one run, and in `_hold_round` one round.
"""

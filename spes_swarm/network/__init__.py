"""The network process: all of a peer's communication with other peers.

Imports `base`, `protocol`, `config` and `port`.

- `transport` this peer's libp2p daemon (p2pd), and calls and streams through it
- `link`      connections: framed streams, requests, the DHT, the swarm clock, reachability and relays
- `round`     the rendezvous and the exchange of a round
- `transfer`  peer-to-peer transfer of the reference

Start with `round.sync_round`, one round from top to bottom, then `run_services`, which creates and connects the
services of a run, and `run_commands`, which executes the trainer's commands with them.
"""

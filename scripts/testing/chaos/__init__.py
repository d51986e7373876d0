"""Seeded faults on a swarm of real processes (`scripts/chaos.py`).

Start with `schedule` (which faults, and when), then `swarm` (how they are injected, and what must hold).
"""

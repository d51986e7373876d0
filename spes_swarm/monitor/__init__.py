"""Watches a swarm from outside, from the signed records in its DHT; see __main__.py for the command."""

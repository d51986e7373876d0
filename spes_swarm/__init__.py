"""Peer-to-peer training of Mixture-of-Experts language models by sparse expert synchronisation (SPES)."""

__version__ = "0.1.0"

"""Text to tokens to batches: readers, tokenizers, token files, and a sampler that can be resumed.

Imports `base`, `protocol` and `config`. Begin with `corpus.open_source`, then `sampler`.
"""

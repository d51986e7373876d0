"""Text to tokens to batches: readers, tokenizers, token files, and a resumable sampler.

Imports `base`, `protocol` and `config`. Begin with `corpus.open_corpus`, then `sampler`.
"""

"""Text to tokens to batches: readers, tokenizers, token files, and a resumable sampler.

Imports `base` and `config`. Start with `corpus.open_corpus`, then `sampler`.
"""

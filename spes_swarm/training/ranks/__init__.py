"""All GPUs of a machine as one peer: every rank computes the gradients of its share of each batch.

Rank 0 is the peer; the other ranks follow it. Start with `shared_gradients` for rank 0 and `follower` for the others;
`orders` lists what rank 0 tells them.
"""

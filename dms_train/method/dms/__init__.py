"""Dynamic Memory Sparsification: a token is evicted or kept when it leaves a window."""

"""Layers of the Megatron model.

Start with `attention` (self-attention with eviction decisions) and `layer_spec` (the block);
`backend` chooses Transformer Engine or megatron-core layers. `fusions` sets what a GPU fuses.
`residual` adds to the residual stream inside the norms, for megatron-core's layers on a GPU.
`vocabulary_losses` computes losses after a vocabulary-parallel output layer. `retention` counts
kept tokens.
"""

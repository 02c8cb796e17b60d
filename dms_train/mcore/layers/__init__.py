"""Layers of the Megatron model.

Start with `attention` (self-attention with eviction decisions) and `layer_spec` (the block);
`backend` chooses Transformer Engine or megatron-core layers. `fusions` sets what a GPU fuses, and
`residual` is the layer that a GPU runs with megatron-core's own.
`vocabulary_losses` computes losses after a vocabulary-parallel output layer. `retention` counts
kept tokens.
"""

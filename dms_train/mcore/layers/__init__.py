"""Layers of the Megatron model.

Start with `attention` (self-attention with eviction decisions) and `layer_spec` (the block);
`backend` chooses Transformer Engine or megatron-core layers, `fusions` what a GPU fuses,
`vocabulary_losses` the losses behind a vocabulary-parallel output layer, `retention` the counts of
kept tokens.
"""

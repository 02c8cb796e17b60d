"""Fused layers around the attention: RoPE, SwiGLU, eviction decisions; forward and backward."""

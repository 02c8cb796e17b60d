"""Fused layers around the attention: RoPE, SwiGLU, RMSNorm, eviction decisions; forward and backward."""

"""Fused layers around the attention: RoPE, SwiGLU, RMSNorm, decisions; each with its gradient."""

"""Fused layers around the attention: RoPE, gates, RMSNorm, decisions; each with its gradient."""

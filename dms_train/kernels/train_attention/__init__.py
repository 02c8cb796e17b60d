"""Training attention with a soft eviction bias.

Start with `interface` and `reference` (dense, readable). `blockwise` runs on a CPU, `flex` is
FlexAttention, and `triton_attention` launches the fused kernels, whose tiles `launch_plan` chooses.
"""

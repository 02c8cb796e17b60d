"""Attention of long prompts over the tokens that are not evicted.

Start with `sparse`, which processes a prompt chunk by chunk. `lists` has the arguments of the
kernels, `triton_pack` compacts the kept tokens, `triton_attention` and `triton_hopper` attend to
them. `interface` is what other packages call.
"""

"""Plugin that serves exports with vLLM: `vllm serve EXPORT`.

vLLM keeps its scheduler, its block pool and its memory. One block of vLLM is a credit for one page
of every KV list of a request; no block has an address. The decode and prompt kernels take pages on
the device from the tensor that vLLM allocated. The number of pages that each request holds returns
to the scheduler with the sampled tokens.

vLLM calls `plugin.register` in each of its processes. `compat` holds all differences between
versions of vLLM.
"""

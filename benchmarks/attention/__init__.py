"""Attention kernels beside other kernels: times in `main`, errors in `accuracy`."""

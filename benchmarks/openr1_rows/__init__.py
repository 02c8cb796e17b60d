"""Speed and resumption of `dms-data openr1`: `python -m benchmarks.openr1_rows`."""

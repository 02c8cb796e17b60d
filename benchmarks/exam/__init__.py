"""Problems that a model solves greedily: `python -m benchmarks.exam`."""

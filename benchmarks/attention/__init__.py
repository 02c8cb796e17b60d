"""Training, prefill and decode attention beside their peers: `python -m benchmarks.attention`.

`train_cases`, `prefill_cases` and `decode_cases` hold the measurements, `accuracy` the errors;
`page` writes docs/performance/attention.md.
"""

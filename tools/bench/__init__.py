"""`slipstream bench`: answers the same prompts with and without speculation.

`reports.py` is the entry point. It runs `experiment.py` (batches of concurrent requests, arms interleaved) or
`open_loop.py` (Poisson arrivals at given rates). `latencies.py` holds the statistics, `tables.py` the terminal tables,
and `baseline.py` the reference arm, Hugging Face `generate`.
"""

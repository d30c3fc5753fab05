"""`slipstream bench`: answers the same prompts with and without speculation.

`reports.py` is the entry point. It runs `experiment.py` (interleaved batches of concurrent requests) or `open_loop.py`
(Poisson arrivals at given rates). `latencies.py` computes statistics, `tables.py` renders terminal tables, and
`baseline.py` implements the reference arm, Hugging Face `generate`.
"""

"""Tracing data of a request: whether it is traced, and the events of its rounds. Pure; OpenTelemetry is in `actors`.

Input: messages of traced sessions and the tracing settings. Output: bounded lists of events with counts, free of tokens
and texts. Start with `session_tracer.py`, the hooks that processes call; `round_events.py` turns messages into events.
"""

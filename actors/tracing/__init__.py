"""OpenTelemetry spans of a process's work for traced sessions.

`service.py` is the entry point: it does nothing, and imports no OpenTelemetry, unless tracing is configured.
`session_spans.py` makes the spans, `exporting.py` sends them, and `contexts.py` converts trace contexts.
"""

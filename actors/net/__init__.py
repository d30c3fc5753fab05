"""Long-lived gRPC streams between routers, drafters and targets.

Start with `streams.py`. A `Link` dials a peer and redials when the stream breaks, `converse` serves a stream after its
greeting, and an `Outbox` queues messages for one peer. `credentials.py` authenticates peers; `auth_interceptor.py`
decides which callers may open a stream.
"""

"""Long-lived gRPC streams between routers, drafters and targets.

`streams.py` is the place to start: a `Link` dials a peer and redials when the stream breaks, `converse` serves a
greeted stream, and an `Outbox` queues what is due for one peer. `credentials.py` authenticates peers, and
`auth_interceptor.py` decides which callers may open a stream.
"""

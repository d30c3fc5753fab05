"""Options of every gRPC channel and server: frame size limits, and how soon a silent peer counts as gone."""

from protos.messages import MAX_FRAME_BYTES

KEEPALIVE_MS = 2_000  # a hanging peer is detected within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS
KEEPALIVE_TIMEOUT_MS = 3_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # this one is decisive; its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.use_local_subchannel_pool", 1),  # redialing a peer that hung must not reuse a pooled connection
    ("grpc.so_reuseport", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.max_concurrent_streams", 64),  # per connection; ours uses one
)

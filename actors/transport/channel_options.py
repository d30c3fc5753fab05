"""What every channel and server is told: how large frames may be, and how soon a silent peer is given up."""

from protos.messages import MAX_FRAME_BYTES

KEEPALIVE_MS = 2_000  # a peer that hangs is noticed within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS
KEEPALIVE_TIMEOUT_MS = 3_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # this is the one that counts; its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.use_local_subchannel_pool", 1),  # a dialled peer that hung is dialled anew, not found in a pool
    ("grpc.so_reuseport", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.max_concurrent_streams", 64),  # of one connection; ours has one
)

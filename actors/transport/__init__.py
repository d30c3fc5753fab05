"""Long-lived gRPC streams between peers."""

"""The link over gRPC streams: frames as messages, flow control, resuming after a break."""

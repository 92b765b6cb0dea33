"""The gRPC channel: `channel` needs no package, `calls` needs grpcio."""

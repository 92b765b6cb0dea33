"""The gRPC protocol: `tasks.proto`, `callback.proto`, and the code that grpcio-tools makes of them.

`tools/grpc-stubs` writes every other Python file here. Nothing else belongs in this folder.
"""

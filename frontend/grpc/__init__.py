"""gRPC in the place of HTTP (--grpc): the service vllm.grpc.engine.VllmEngine, as routers in front of vLLM call it.

The messages are those of the package smg-grpc-proto. messages.py reads and writes them, servicer.py has the methods, and
listener.py has the port. Imported only with --grpc.
"""

"""What is told of requests and of the server: metrics, traces, log lines."""

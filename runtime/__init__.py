"""What every process does alike: links over ZeroMQ, start-up, signals, heartbeats, logging."""

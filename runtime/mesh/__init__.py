"""Links between processes over ZeroMQ, and operations that go over them."""

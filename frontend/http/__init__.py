"""HTTP itself: the server, connections, bodies, and what stands around every route."""

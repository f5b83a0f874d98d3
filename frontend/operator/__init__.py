"""Routes for who operates a server."""

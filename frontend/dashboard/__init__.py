"""GET /dashboard: a page that shows the mesh, and the events that it is made of."""

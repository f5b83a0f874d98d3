"""A request on its way through the mesh, from its Submits to the end of its answer."""

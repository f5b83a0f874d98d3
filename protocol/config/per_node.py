"""The mark of settings in which the nodes of one mesh may differ; it stands in a field's `extra`."""

PER_NODE = {"per_node": True}

"""The table of routes, what each does, and its documentation."""

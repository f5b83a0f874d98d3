"""The coordinator process: membership and routing."""

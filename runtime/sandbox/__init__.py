"""Native code that meets what strangers send runs in child processes that may die: a fork server and its children."""

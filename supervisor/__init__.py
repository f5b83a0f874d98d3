"""The supervisor: the command line, the process group and its restarts, and the Python API."""

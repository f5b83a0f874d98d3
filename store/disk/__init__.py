"""The second tier: a file for each key, in a folder or an object store."""

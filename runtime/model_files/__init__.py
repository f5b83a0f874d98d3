"""From the MODEL of the command line to files and facts. Imports no torch."""

"""Which process should run: the process group's pure cores, and what an operator may ask of them."""

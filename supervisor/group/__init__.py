"""The process group's pure cores, which decide what should run, and what an operator may ask of them."""

"""One client of the mesh: what an HTTP process, and the Python API in its place, asks detokenizers and hears of them."""

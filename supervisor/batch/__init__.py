"""`meshlm run-batch`: a file of requests to a file of answers."""

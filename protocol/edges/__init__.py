"""One module per edge: who says what to whom, as typed messages."""

"""The command line: `meshlm` and its subcommands, and what they print."""

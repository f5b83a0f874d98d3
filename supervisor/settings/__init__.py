"""What a start must know before any process runs: flags, files and environment as one configuration, resolved and checked."""

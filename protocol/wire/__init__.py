"""How messages travel: ids, columns, frames, sessions, channels, digests."""

"""Everything the processes say to each other: ids, messages, channels, configuration, session rules.

Imports msgspec and the standard library only. One module per edge; see `channels.py` for who talks to whom.
"""

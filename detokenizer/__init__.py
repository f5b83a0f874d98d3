"""The detokenizer process: text to tokens and back, and the journal of what was said."""

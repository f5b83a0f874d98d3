"""How long a request waits for a process that is away, of whatever role: a rank whose workers load, or any detokenizer."""

NEW_S = 60.0  # one of which its client has nothing yet
BEGUN_S = 600.0  # one whose client reads already: a large model loads for minutes

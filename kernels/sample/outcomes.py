"""What samplers give in the place of a token where none can be chosen. Such a row ends with an error. No torch.

The row's next known token is 0 then: a step that was launched already computes it, and nobody reads what comes of it.
"""

NONE_LEFT = -1  # every logit is -inf: what the request allows leaves nothing
NOT_NUMBERS = -2  # a logit is not a number

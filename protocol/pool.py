"""The extra of a request that wants vectors of its prompt instead of text."""

from enum import Enum
from typing import ClassVar

from meshlm.protocol.extra_kind import ExtraKind


class PoolKind(Enum):
    """The choice of hidden states of the last layer, after the final norm, that make the vector. Names as in vLLM's PoolerConfig."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all tokens'
    CLS = "cls"  # the first token's, which models that look both ways are trained to read from
    ALL = "all"  # every token's own: one vector for each
    SPLADE = "splade"  # of each token of the vocabulary its greatest weight at any place of the prompt


class PoolHead(Enum):
    """What the model makes of pooled states."""

    NONE = "none"  # nothing: the states as they are
    EMBED = "embed"  # sentence-transformers' Dense modules, where the model has some; the activation is the norm 1
    CLASSIFY = "classify"  # the classifier's logits; the activation is the softmax or sigmoid that goes with them


class Pool(ExtraKind, frozen=True, tag="pool", omit_defaults=True):
    """A vector of float32 for the prompt, or for each of its tokens, and no output token. It ends with FinishReason.STOP."""

    kind: PoolKind
    head: PoolHead = PoolHead.NONE
    activation: bool = False
    # of an embedding that is cut before its activation (Kusupati et al. 2022, "Matryoshka"); 0: all
    dimensions: int = 0
    # of ALL: the token whose vectors are wanted, at the end of each step of a solution; -1: all tokens
    step_tag_id: int = -1
    second_from: int = 0  # the place of the second text of a pair, whose tokens are of type 1; 0: there is none
    bos_token_id: int = -1  # of ALL: a first token that has no vector; -1: it has
    eos_token_id: int = -1  # and a last one
    generates: ClassVar[bool] = False

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the tokens of the prompt say which vectors are given out."""
        return max(self.step_tag_id, self.bos_token_id, self.eos_token_id) >= 0

    def num_vectors(self, num_prompt: int) -> int:
        return num_prompt if self.kind is PoolKind.ALL else 1

    @property
    def reads_prefix_cache(self) -> bool:
        """Tokens whose KV is in the prefix cache have no hidden state any more; the last token is always computed."""
        return self.kind is PoolKind.LAST

"""What a model's vectors are: which tasks it serves, and how its hidden states become vectors. Found out once, by the supervisor."""

from typing import Literal

from msgspec import Struct

from meshlm.protocol.pool import Pool, PoolHead, PoolKind

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class DenseSpec(Struct, frozen=True, kw_only=True):
    """One Dense module of sentence-transformers."""

    folder: str  # within the model's
    inputs: int
    outputs: int
    bias: bool
    act: str  # a name of torch.nn: Identity, Tanh ...


class PoolingSpec(Struct, frozen=True, kw_only=True):
    """The vectors that a model serves."""

    tasks: tuple[PoolingTask, ...]  # the first is what POST /pooling does unasked
    kind: PoolKind  # of embed and classify
    activation: bool = True  # where a request does not say use_activation
    size: int  # numbers of an embedding
    matryoshka: bool = False  # it may be cut ...
    matryoshka_dimensions: tuple[int, ...] = ()  # ... to these sizes; empty: to any
    dimensions: int = 0  # to which it is cut where a request says nothing; 0: not
    dense: tuple[DenseSpec, ...] = ()
    prompts: dict[str, str] = {}  # by name: what sentence-transformers puts before a text
    lower_case: bool = False  # sentence-transformers' do_lower_case
    labels: tuple[str, ...] = ()  # of classes
    max_tokens: int = 0  # sentence-transformers' max_seq_length; 0: the model's context
    chunks: bool = False  # texts longer than the context are embedded in parts ...
    max_embed_len: int = 0  # ... up to so many tokens; 0: any number
    # a classifier's logits are shifted and scaled before their activation: (logit - mean) / sigma
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    # by task for tokens: the first and the last token that have no vector; -1: none
    edges: dict[str, tuple[int, int]] = {}
    step_tag_id: int = -1  # of tasks for tokens: the vectors of this token alone are given out; -1: of all

    @property
    def scores_by(self) -> PoolingTask:
        return next(task for task in ("classify", "embed", "token_embed", "token_classify") if task in self.tasks)

    def pool(self, task: PoolingTask, *, activation: bool | None = None, dimensions: int = 0) -> Pool:
        """What the mesh is asked for a task of these."""
        begin, end = self.edges.get(task, (-1, -1))
        kind = PoolKind.ALL if task in ("token_embed", "token_classify") else self.kind
        active = self.activation if activation is None else activation
        if task in ("embed", "token_embed"):
            tag = self.step_tag_id if kind is PoolKind.ALL else -1
            return Pool(kind, PoolHead.EMBED, active, dimensions or self.dimensions, tag, 0, begin, end)
        tag = self.step_tag_id if kind is PoolKind.ALL else -1
        return Pool(kind, PoolHead.CLASSIFY, active, 0, tag, 0, begin, end)

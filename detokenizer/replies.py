"""The answers that need the vocabulary only: what a prompt became, and the replies of /tokenize and /detokenize. Pure."""

from array import array

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.request_state import RequestState
from meshlm.protocol.edges.text import Accepted, Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError


def accepted(requests: list[RequestState], prompt: "array[int]", table: TokenTable) -> Accepted:
    """The Accepted message for all choices of one prompt."""
    handles = tuple(request.frontend_handle for request in requests)
    submit = requests[0].submit
    arrival_s = (submit.retry.begun_s or submit.arrival_s) if submit.retry is not None else 0.0
    ids = prompt.tobytes() if submit.want_ids else b""
    told = tuple(request.num_told for request in requests)
    num_told = told if any(told) else ()
    if not submit.want_text:
        return Accepted(handles, len(prompt), ids, arrival_s=arrival_s, num_told=num_told)
    text = table.tokenizer.decode(list(prompt), skip_special_tokens=False)
    first = table.decoder(skip_special_tokens=False).push(prompt[0])
    return Accepted(handles, len(prompt), ids, text, first, arrival_s, num_told)


def answer(
    question: Tokenize | Detokenize, encoder: Encoder, table: TokenTable, vocab_size: int, max_model_len: int
) -> TokenizeReply | DetokenizeReply:
    """Answers a question; called in a thread, since a long text takes seconds."""
    try:
        if isinstance(question, Tokenize):
            return _tokenized(question, encoder, table, max_model_len)
        return _detokenized(question, table, vocab_size)
    except RequestError as error:
        reply = TokenizeReply if isinstance(question, Tokenize) else DetokenizeReply
        return reply(question.handle, error=error.message, param=error.param, kind=error.kind)


def _tokenized(question: Tokenize, encoder: Encoder, table: TokenTable, max_model_len: int) -> TokenizeReply:
    prompt, offsets = question.prompt, array("i")
    if question.want_offsets:
        token_ids, offsets = encoder.offsets(prompt)
    else:
        token_ids = encoder.encode(prompt)
    strings = tuple(map(table.name, token_ids)) if question.want_strings else ()
    mask = encoder.assistant_mask(prompt)[1] if question.want_assistant_mask else b""
    columns = (token_ids.tobytes(), strings, offsets.tobytes())
    return TokenizeReply(question.handle, *columns, max_model_len, assistant_mask=mask)


def _detokenized(question: Detokenize, table: TokenTable, vocab_size: int) -> DetokenizeReply:
    ids = unpack_i32(question.token_ids).tolist()
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        text = f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}"
        raise RequestError(ErrorKind.INVALID, text, "tokens")
    if question.each:
        each, data = zip(*map(table.show, ids)) if ids else ((), ())
        return DetokenizeReply(question.handle, texts=each, token_bytes=data)
    if question.output is not None:
        decoder = table.decoder(question.output.skip_special_tokens, question.output.keep_special_tokens)
        texts = [decoder.push(token) for token in ids]
        return DetokenizeReply(question.handle, "".join(texts) + decoder.finish(), pack_i32(map(len, texts)))
    (text,) = table.tokenizer.decode_batch([ids], skip_special_tokens=False)  # it lets go of the interpreter's lock
    return DetokenizeReply(question.handle, text)

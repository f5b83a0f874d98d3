"""A frontend without a mesh whose tokens are letters."""

from scripted import Scripted

from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, TextPrompt, Tokenize, TokenizeReply
from meshlm.protocol.wire.columns import ints, pack_i32


class Letters(Scripted):
    """Its tokens are letters, by their numbers."""

    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        if isinstance(message, Detokenize):
            ids = list(ints(message.token_ids))
            if message.each:
                return DetokenizeReply(
                    message.handle, texts=tuple(map(chr, ids)), token_bytes=tuple(bytes((token,)) for token in ids)
                )
            return DetokenizeReply(message.handle, bytes(ids).decode(), pack_i32([1] * len(ids)))
        text = message.prompt.text if isinstance(message.prompt, TextPrompt) else "chat"
        places = pack_i32([place for at in range(len(text)) for place in (at, at + 1)]) if message.want_offsets else b""
        mask = b"\1\0\0\1" if message.want_assistant_mask else b""  # of "chat"
        return TokenizeReply(message.handle, pack_i32(list(text.encode())), (), places, 2048, assistant_mask=mask)

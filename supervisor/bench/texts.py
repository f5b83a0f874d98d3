"""The served model's tokenizer, as `bench serve` reaches it: POST /tokenize of the server, or a file of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError, UsageError


class ServerTexts:
    """The served model's tokenizer, by the server's routes (data.Texts). StartError when the server does not tokenize."""

    def __init__(self, server: Server, model: str, template_kwargs: Mapping[str, Any] | None) -> None:
        self._server, self._model, self._kwargs = server, model, dict(template_kwargs or {})

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self._tokens({"prompt": text}) for text in texts]

    def chat(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        kwargs = {"chat_template_kwargs": self._kwargs} if self._kwargs else {}
        return self._tokens({"messages": messages, "add_generation_prompt": True, **kwargs})

    def decode(self, token_ids: list[int]) -> str:
        return str(self._ask("/detokenize", {"tokens": token_ids}, "prompt"))

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        found: list[int] = self._ask("/tokenize", body, "tokens")
        return found

    def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        try:
            with self._server.request("POST", path, {"model": self._model, **body}) as response:
                return msgspec.json.decode(response.read())[key]
        except StartError as error:
            raise StartError(f"POST {path}: {error}; --tokenizer takes one of your own") from None


class OwnTexts:
    """A tokenizer.json. Chat templates are the server's all the same."""

    def __init__(self, name: str, server: ServerTexts) -> None:
        from tokenizers import Tokenizer

        file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            self._tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
        except Exception as error:  # tokenizers raises nothing narrower
            raise UsageError(f"--tokenizer {name}: {' '.join(str(error).split())}") from None
        self.chat = server.chat

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts)]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

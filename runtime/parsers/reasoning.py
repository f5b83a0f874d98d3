"""How models write their reasoning before an answer. Pure data; frontend/openai/reasoning.py reads with it."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

SWITCHES = ("enable_thinking", "thinking")  # of chat templates
CHANNEL_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


class ReasoningParser(Struct, frozen=True):
    """Reasoning between two texts: what --reasoning-parser names, and what an entry point of `meshlm.reasoning_parsers` gives."""

    open: str = "<think>"
    close: str = "</think>"
    # An answer begins with reasoning, also where the opening text is the prompt's; else only behind it.
    assumed: bool = True
    # A request's chat_template_kwargs can switch reasoning off, or on; `effort` is on where a reasoning_effort asks for any.
    when: Literal["always", "unless_off", "if_on", "effort"] = "unless_off"
    opened_by: tuple[str, str] | None = None  # the argument of the template that opens the reasoning in the prompt
    hides: tuple[str, ...] = ()  # tags in the content that are nobody's
    begins_content: str = ""  # all is content, and this stands before it
    channels: bool = False  # messages of harmony instead of two texts; `close` begins the content

    def reasons(self, template_kwargs: Mapping[str, Any]) -> bool:
        """Whether an answer to this request may begin with reasoning."""
        if self.begins_content:
            return False
        match self.when:
            case "always":
                return True
            case "unless_off":
                return all(template_kwargs.get(switch) is not False for switch in SWITCHES)
            case "if_on":
                return any(bool(template_kwargs.get(switch)) for switch in SWITCHES)
            case "effort":
                return template_kwargs.get("reasoning_effort") not in (None, "none", "no_think")

    def opens_in_prompt(self, template_kwargs: Mapping[str, Any]) -> bool:
        return self.opened_by is not None and template_kwargs.get(self.opened_by[0]) == self.opened_by[1]

    @property
    def tags(self) -> tuple[str, ...]:
        """What may be special tokens of the model's, which its decoder must show."""
        return CHANNEL_TAGS if self.channels else (self.open.strip(), self.close.strip(), *self.hides)


_THINK = ReasoningParser()
_ALWAYS = ReasoningParser(when="always")
_COHERE = ReasoningParser("<|START_THINKING|>", "<|END_THINKING|>", assumed=False)
FORMATS = {
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_r1": _ALWAYS,
    "deepseek_v3": ReasoningParser(when="if_on"),
    "deepseek_v4": ReasoningParser(when="if_on"),
    "ernie45": ReasoningParser(hides=("<response>", "</response>")),
    "gemma4": ReasoningParser("<|channel>thought\n", "<channel|>", assumed=False),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": ReasoningParser("Here is my thought process:", "Here is my response:", assumed=False),
    "holo2": _THINK,
    "hunyuan_a13b": ReasoningParser("<think>\n", "\n</think>\n", assumed=False, hides=("<answer>\n", "\n</answer>")),
    "hy_v3": ReasoningParser(when="effort"),
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax_m2": _ALWAYS,
    "minimax_m2_append_think": ReasoningParser(begins_content="<think>"),
    "minimax_m3": ReasoningParser("<mm:think>", "</mm:think>", assumed=False, opened_by=("thinking_mode", "enabled")),
    "mistral": ReasoningParser("[THINK]", "[/THINK]", assumed=False),
    "nemotron_v3": _THINK,
    "olmo3": _ALWAYS,
    "openai_gptoss": ReasoningParser("", "<|channel|>final<|message|>", assumed=False, when="always", channels=True),
    "poolside_v1": ReasoningParser(when="if_on"),
    "qwen3": _THINK,
    "seed_oss": ReasoningParser("<seed:think>", "</seed:think>"),
    "step3": _ALWAYS,
    "step3p5": _ALWAYS,
}


def between(name: str) -> ReasoningParser | None:
    """The parser that `--reasoning-parser '<a>...</a>'` spells out: reasoning stands between these two texts."""
    begin, dots, end = (part.strip() for part in name.partition("..."))
    return ReasoningParser(begin, end, assumed=False) if dots and begin and end and begin not in end else None

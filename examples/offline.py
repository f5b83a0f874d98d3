"""Many prompts at once, without a server.

    python examples/offline.py [MODEL] [--device fake]

MODEL as for `meshlm serve`; without it, the small default model.
"""

import argparse

from meshlm import LLM, SamplingParams

BEGINNINGS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "The three states of matter are"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete some prompts.")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, device=arguments.device)
    for answer in llm.generate(BEGINNINGS, SamplingParams(temperature=0.0, max_tokens=24)):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()

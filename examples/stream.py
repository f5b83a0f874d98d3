"""A streamed chat answer, by the official client, and how fast it came.

python examples/stream.py "Why is the sky blue?" [--url http://127.0.0.1:8000]
"""

import argparse
import time

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream one chat answer.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    begun, first = time.perf_counter(), 0.0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=arguments.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter()
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage is not None:  # the last chunk
            count, took = chunk.usage.completion_tokens, time.perf_counter() - first
            print(f"\n\n{count} tokens; the first after {first - begun:.2f} s, then {(count - 1) / took:.0f} a second")


if __name__ == "__main__":
    main()

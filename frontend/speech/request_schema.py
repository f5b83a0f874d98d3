"""The JSON schema of the forms, where the types of schema.py do not say it. Called by frontend/routes/request_schema.py."""

from typing import Any

Json = dict[str, Any]
FORMS = ("TranscriptionRequest", "TranslationRequest")
_NULL: Json = {"type": "null"}


def refine(schemas: Json, names: tuple[str, ...], *, takes_priorities: bool) -> None:
    """Says it of the forms among these schemas: `file` is binary, and a list has [] behind its name."""
    for name in FORMS:
        if name not in schemas:
            continue
        fields = schemas[name]["properties"]
        fields["file"] = {"type": "string", "format": "binary", "description": "wav, mp3, flac, ogg, webm, m4a or mp4"}
        fields["model"] = {"anyOf": [{"enum": list(names)}, _NULL]}
        fields["timestamp_granularities[]"] = fields.pop("timestamp_granularities") | {"items": {"enum": ["segment"]}}
        if not takes_priorities:
            fields["priority"] = {"const": 0}
        if "to_language" in fields:
            fields["to_language"] = {"enum": ["en", None]}

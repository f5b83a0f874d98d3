"""The routes of a server whose model transcribes audio, as operations.py has those of others."""

from meshlm.frontend.routes.operation import ASKS, NAMED, SRT, TEXT, VTT, Operation
from meshlm.frontend.speech import schema


def _operation(name: str, summary: str, body: type[schema.SpeechRequest]) -> Operation:
    return Operation(
        f"/v1/audio/{name}",
        f"speech.{name}",
        schema.TranscriptionResponse,
        summary,
        body,
        ("POST",),
        ASKS,
        NAMED,
        streams=True,
        is_form=True,
        texts=(TEXT, SRT, VTT),
    )


SPEECH = (
    _operation("transcriptions", "Write down what is said in an audio clip.", schema.TranscriptionRequest),
    _operation("translations", "Write down in English what is said in an audio clip.", schema.TranslationRequest),
)

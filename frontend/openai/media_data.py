"""The images and other items of a completion, beside its prompt (`multi_modal_data`). Pure; HttpError names the field at fault."""

from typing import Any

import msgspec

from meshlm.frontend.http.errors import as_http, field_error
from meshlm.frontend.openai.schema import CompletionRequest
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.media_spec import MediaSpec
from meshlm.runtime.mesh import media_parts

NAME, UUIDS = "multi_modal_data", "multi_modal_uuids"


def of_completion(request: CompletionRequest, num_prompts: int, spec: MediaSpec | None) -> list[MediaSource]:
    """Their sources, by modality in the order of the placeholders in the prompt. spec: of a model that takes some."""
    data, kwargs = request.multi_modal_data, request.mm_processor_kwargs
    if not data:
        for name, given in ((UUIDS, request.multi_modal_uuids), ("mm_processor_kwargs", kwargs)):
            if given:
                raise field_error(name, f"goes with {NAME}")
        return []
    if spec is None:
        raise field_error(NAME, "this model takes text alone")
    fields: dict[str, Any] = {
        "use_beam_search": request.use_beam_search,
        "prompt_embeds": request.prompt_embeds,
        "suffix": request.suffix,
    }
    for name, given in fields.items():
        if given:
            raise field_error(name, f"does not go with {NAME}")
    if num_prompts > 1:
        raise field_error(NAME, f"goes with one prompt, got {num_prompts}")
    reading = media_parts.Reading(spec, msgspec.json.encode(kwargs) if kwargs else b"")
    with as_http():
        return media_parts.of_data(data, request.multi_modal_uuids or {}, reading)

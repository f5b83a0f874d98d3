"""What a model sees beside text, as data: read once from the config.json of the whole model (architectures/media.py)."""

from msgspec import Struct

from meshlm.protocol.media import Modality


class MediaSpec(Struct, frozen=True, kw_only=True):
    """The encoders in front of a text model, and how the text model takes its vectors."""

    architecture: str  # of the whole model's config.json
    config: str  # that config.json with all overrides, as JSON: transformers makes the encoder of it
    tower: str  # the model_type of the encoder: clip_vision_model, siglip_vision_model, qwen2_5_vl, ...
    hidden_size: int  # of a vector, which takes the place of a token's embedding
    placeholders: tuple[tuple[Modality, int], ...]  # by modality, the id of the token whose place a vector takes
    deepstack: int = 0  # the first layers of the text model behind each of which an image's tokens get a vector more
    # M-RoPE (Wang et al. 2024): so many frequencies of a head turn by the frame, the row and the column of a vector; none: plain RoPE
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = (
        False  # the three take turns from the first frequency on, instead of lying behind one another
    )
    is_timed: bool = (
        False  # M-RoPE takes a video's frames by their seconds, so a position may be higher than the prompt is long
    )
    is_uncut: bool = False  # the vectors of an image attend to one another, so one step computes them
    uncut_in_windows: bool = False  # ... in layers with a window alone, and no further back than that reaches

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(modality for modality, _ in self.placeholders)

    def token_id(self, modality: Modality) -> int | None:
        """The placeholder's; None: the model takes none of that modality."""
        return dict(self.placeholders).get(modality)

    def axes(self, frequencies: int) -> tuple[int, ...]:
        """By frequency of a head's rotation: 0, it turns by the frame, 1, by the row, 2, by the column. ValueError."""
        frames, rows, columns = self.mrope_section
        if frames + rows + columns != frequencies:
            raise ValueError(f"mrope_section {list(self.mrope_section)} is not of {frequencies} frequencies")
        if not self.mrope_interleaved:
            return (0,) * frames + (1,) * rows + (2,) * columns
        found = [0] * frequencies
        for axis, count in ((1, rows), (2, columns)):
            for at in range(axis, min(3 * count, frequencies), 3):
                found[at] = axis
        return tuple(found)

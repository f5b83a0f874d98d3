"""Headers of .gguf files: whatever bytes stand there, the answer is the model's shape or one clear line."""

import contextlib
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_folders import resolve_model
from msgspec.structs import replace

from meshlm.protocol.model import RopeSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.gguf_files import GGUFError, read_header
from meshlm.runtime.model_files.gguf_model import READABLE_TYPES, read_spec
from meshlm.workers.layers.rope import rope_table

U32, F32, TEXT, ARRAY = 4, 6, 8, 9
Value = tuple[int, bytes]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(value: int) -> Value:
    return U32, struct.pack("<I", value)


def header(
    changes: dict[str, Value], shape: tuple[int, ...] = (32, 7), factors: tuple[float, ...] = (), kind: int = 0
) -> bytes:
    fields: dict[str, Value] = {"general.architecture": (TEXT, text("llama"))}
    sizes = {"embedding_length": 32, "context_length": 64, "feed_forward_length": 64, "block_count": 1}
    fields |= {f"llama.{name}": number(size) for name, size in sizes.items()}
    fields |= {"llama.attention.head_count": number(4), "llama.attention.head_count_kv": number(2)}
    fields |= {"llama.attention.layer_norm_rms_epsilon": (F32, struct.pack("<f", 1e-5))} | changes
    found = b"GGUF" + struct.pack("<IQQ", 3, 1 + bool(factors), len(fields))
    found += b"".join(text(name) + struct.pack("<I", kind) + value for name, (kind, value) in fields.items())
    found += text("token_embd.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    found += struct.pack("<IQ", kind, 0)
    if factors:
        found += text("rope_freqs.weight") + struct.pack("<IQIQ", 1, len(factors), 0, 0)
        found += bytes(-len(found) % 32) + struct.pack(f"<{len(factors)}f", *factors)
    return found


def test_the_shape(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header({}))
    spec, _, _ = read_spec(tmp_path / "m.gguf")
    assert (spec.vocab_size, spec.hidden_size, spec.head_dim, spec.num_key_value_heads) == (7, 32, 8, 2)


def test_factors_of_rotation(tmp_path: Path) -> None:
    """As Llama 3.1's files have them."""
    (tmp_path / "m.gguf").write_bytes(header({}, factors=(1.0, 1.0, 2.5, 8.0)))
    spec, _, _ = read_spec(tmp_path / "m.gguf")
    table, plain = rope_table(spec, 64), rope_table(replace(spec, rope=RopeSpec()), 64)
    assert torch.equal(table[:, [0, 1, 4, 5]], plain[:, [0, 1, 4, 5]])
    assert torch.allclose(table[::8, 3], plain[:8, 3], atol=1e-6)
    assert torch.allclose(table[::5, 6][:13], plain[::2, 6][:13], atol=1e-6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header({"general.alignment": (ARRAY, struct.pack("<IQI", U32, 1, 32))}), "not a readable GGUF file"),
        (header({"general.alignment": (F32, struct.pack("<f", float("inf")))}), "not a readable GGUF file"),
        (header({"general.alignment": number(0)}), "not a readable GGUF file"),
        (header({"x": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)}), "not a readable GGUF file"),
        (header({"x": (ARRAY, struct.pack("<IQ", U32, 1 << 62))}), "not a readable GGUF file"),
        (header({"llama.attention.head_count": (ARRAY, struct.pack("<IQI", U32, 1, 4))}), "metadata of another kind"),
        (header({"llama.attention.head_count": number(0)}), "metadata of another kind"),
        (header({"general.architecture": (ARRAY, struct.pack("<IQI", U32, 1, 4))}), "is not supported"),
        (header({"llama.block_count": number(1 << 31)}), "block_count is 2147483648, with 1 tensors"),
        (header({}, shape=()), "token_embd.weight is missing, or no matrix"),
        (header({"llama.attention.head_count_kv": number(0)}), "num_key_value_heads is 0; it must be positive"),
        (header({"llama.attention.head_count_kv": number(8)}), "4 is no multiple of num_key_value_heads 8"),
        (header({"llama.attention.key_length": number(2048)}), "head_dim 2048 .* 1024 at most"),
        (header({}, factors=(1.0, 2.0)), "2 factors of rotation; there are 4 frequencies"),
        (header({}, factors=(1.0, 0.0, 2.0, 3.0)), "rope_freqs.weight holds what is no positive number"),
        (header({}, factors=(1.0, 1.0, 2.0, 3.0))[:-2], "metadata of another kind"),
        (header({"llama.rope.dimension_count": number(4)}), "llama.rope.dimension_count is 4; only 8 is supported"),
        (header({"llama.attention.value_length": number(4)}), "llama.attention.value_length is 4; only 8"),
        (header({"llama.vocab_size": number(9)}), "llama.vocab_size is 9; only 7"),
        (header({"llama.expert_count": number(8)}), "metadata llama.expert_used_count is missing"),
        (header({"llama.attention.sliding_window": number(5)}), "llama.attention.sliding_window 5 changes"),
        (header({"llama.attention.causal": (7, b"\0")}), "llama.attention.causal False changes"),
        (header({"llama.attention.scale": (F32, struct.pack("<f", 0.5))}), "llama.attention.scale 0.5 changes"),
        (header({"llama.rope.scaling.type": (TEXT, text("longrope"))}), "rope.scaling.type longrope is not supported"),
        (header({"llama.new_kind_of_scale": number(2)}), "llama.new_kind_of_scale 2 changes"),
        (header({"general.type": (TEXT, text("adapter"))}), "general.type is 'adapter'; a model is"),
        (header({"general.architecture": (TEXT, text("nobody"))}), "architecture 'nobody' is not supported"),
        (
            header({"split.count": (2, struct.pack("<H", 3))}),
            "the first of 3 files; their names must end in -00001-of-",
        ),
        (header({"split.count": number(3), "split.no": number(1)}), "part 2 of 3 of a model; give the first"),
        (header({"split.count": (TEXT, text("3"))}), "split.count is '3'"),
        (header({}, kind=24), "tensor token_embd.weight has type 24, which cannot be read"),
        (header({"llama.attention.key_length": number(7)}), "head_dim 7 of which 7 are rotated; an even number"),
    ],
)
def test_what_cannot_be_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelFilesError, match=said) as error:
        resolve_model(str(tmp_path / "m.gguf"))
    assert "\n" not in str(error.value)


def test_metadata_that_asks_for_nothing(tmp_path: Path) -> None:
    changes = {"llama.expert_count": number(0), "llama.rope.scaling.attn_factor": (F32, struct.pack("<f", 1.0))}
    changes |= {"general.sampling.top_k": number(5), "maker.version": number(3), "llama.attention.causal": (7, b"\1")}
    (tmp_path / "m.gguf").write_bytes(header(changes))
    sampling, unknown = sorted(resolve_model(str(tmp_path / "m.gguf"), tokenizer=str(tmp_path)).notes)
    assert "general.sampling.top_k" in sampling
    assert "unknown metadata is ignored: maker.version" in unknown


def test_types_that_are_said_to_be_readable_can_be_decoded() -> None:
    from gguf import quants

    assert {kind.value for kind in quants._type_traits} | {0, 1} >= READABLE_TYPES


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=9)), max_size=4), st.integers(0, 900))
def test_any_bytes_are_a_shape_or_an_error(tmp_path: Path, changes: list[tuple[int, bytes]], cut: int) -> None:
    content, path = bytearray(header({})), tmp_path / "m.gguf"
    for at, new in changes:
        content[at % len(content) : at % len(content) + len(new)] = new
    path.write_bytes(bytes(content[: len(content) - cut]) if cut < 300 else bytes(content))
    for read in (read_header, read_spec):
        with contextlib.suppress(GGUFError):
            read(path)


VOCABULARY = "tokenizer.ggml.tokens"


def array(kind: int, count: int, values: bytes) -> Value:
    return ARRAY, struct.pack("<IQ", kind, count) + values


WORDS = array(TEXT, 3, text("a") + text("") + text("é"))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_vocabulary_is_read_where_it_is_wanted_and_stepped_over_elsewhere(tmp_path: Path, wanted: bool) -> None:
    path = tmp_path / "model.gguf"
    nested = array(
        ARRAY, 2, struct.pack("<IQ", TEXT, 1) + text("b") + struct.pack("<IQ", U32, 2) + struct.pack("<II", 4, 5)
    )
    path.write_bytes(
        header(
            {VOCABULARY: WORDS, "tokenizer.ggml.scores": array(F32, 2, struct.pack("<ff", 1, 2)), "x.nested": nested}
        )
    )
    found = read_header(path, lambda name: wanted or name.startswith("llama."))
    assert found.tensors["token_embd.weight"].shape == (32, 7)
    assert found.fields["llama.block_count"] == 1
    if wanted:
        assert found.fields[VOCABULARY] == ["a", "", "é"]
        assert found.fields["tokenizer.ggml.scores"] == [1.0, 2.0]
        assert found.fields["x.nested"] == [["b"], [4, 5]]
    else:
        assert not {VOCABULARY, "x.nested"} & found.fields.keys()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(
    "words",
    [array(TEXT, 1 << 60, text("a")), array(TEXT, 2, text("a") + struct.pack("<Q", 1 << 62)), array(U32, 1 << 62, b"")],
)
def test_an_array_that_runs_past_the_end(tmp_path: Path, words: Value, wanted: bool) -> None:
    """Also where nobody wants it: what stands behind is read from the wrong place."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header({VOCABULARY: words}))
    with pytest.raises(GGUFError, match="not a readable GGUF file"):
        read_header(path, lambda name: wanted)

"""Prompts with images: placeholders, what stands around them, mismatches and cuts."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_bench import F0, LETTERS, S0, Bench, admits, token_ids

from meshlm.detokenizer.admission import left_extras
from meshlm.detokenizer.attempts import MEDIA_GONE
from meshlm.detokenizer.events import Encode, Encoded
from meshlm.detokenizer.media import expanded, with_texts
from meshlm.protocol.edges.admit import AbortRequests, Admit
from meshlm.protocol.edges.media import RENEW_S, Hold, HoldMedia, MediaGone
from meshlm.protocol.edges.text import Detach, MediaPrompt, Retry, Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.events import PeerUp, Send, Tick

IMAGE, VIDEO = 90, 91
MEDIA = Identity(Role.MEDIA)


def item(
    *replacement: int, placeholder: int = IMAGE, before: str = "", after: str = "", name: bytes = b"a"
) -> MediaItem:
    return MediaItem(
        modality=Modality.IMAGE if placeholder == IMAGE else Modality.VIDEO,
        digest=name.ljust(32),
        replacement=pack_i32(replacement),
        is_vector=bytes(token in (IMAGE, VIDEO) for token in replacement),
        placeholder=placeholder,
        before=before,
        after=after,
    )


PIECES = st.lists(
    st.one_of(st.lists(st.integers(0, 9), max_size=4), st.tuples(st.sampled_from([IMAGE, VIDEO]), st.integers(0, 4))),
    max_size=8,
)


@given(PIECES)
def test_the_nth_placeholder_of_a_kind_is_its_nth_item(pieces: list[list[int] | tuple[int, int]]) -> None:
    """Replacements have the placeholder in them, as those of models do, and any length."""
    prompt, expected, items, begins = array("i"), array("i"), list[MediaItem](), list[int]()
    for number, piece in enumerate(pieces):
        if isinstance(piece, list):
            prompt.extend(piece)
            expected.extend(piece)
            continue
        placeholder, count = piece
        replacement = [50 + number, *[placeholder] * count]
        items.append(item(*replacement, placeholder=placeholder, name=bytes([number])))
        begins.append(len(expected))
        prompt.append(placeholder)
        expected.extend(replacement)
    # A request has its images in their order, and so its videos, but the two may be given apart.
    given_items = sorted(items, key=lambda one: one.placeholder)
    ids, media = expanded(prompt, Media(tuple(given_items)))
    assert ids == expected
    assert [one.digest for one in media.items] == [one.digest for one in items]
    assert [one.position for one in media.items] == begins


@pytest.mark.parametrize("param", ["messages", "prompt"])
@pytest.mark.parametrize(
    ("count", "words"), [(0, "has 0 placeholders for 2 images"), (1, "has 1 "), (3, "must not have")]
)
def test_more_or_fewer_placeholders_than_images_are_refused(count: int, words: str, param: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        expanded(array("i", [1, *[IMAGE] * count]), Media((item(2), item(3))), param)
    assert (error.value.kind, error.value.param) == (ErrorKind.INVALID, param)
    assert error.value.message.startswith(f"{param}: ")


def test_one_kind_too_few_is_refused_where_the_other_fits() -> None:
    with pytest.raises(RequestError, match="0 placeholders for 1 videos"):
        expanded(array("i", [IMAGE]), Media((item(2), item(3, placeholder=VIDEO))))


def test_each_image_has_its_own_text_around_it() -> None:
    texts = {IMAGE: "<i>", VIDEO: "<v>"}
    media = Media((item(before="1(", after=")"), item(before="2(", after=")"), item(placeholder=VIDEO, after="!")))
    assert with_texts("a<i>b<v><i>", media, texts.__getitem__) == "a1(<i>)b<v>!2(<i>)"
    plain = Media((item(), item()))
    assert with_texts("a<i>b<i>", plain, texts.__getitem__) == "a<i>b<i>"


def test_a_text_with_another_number_of_placeholders_is_left_to_be_refused() -> None:
    media = Media((item(before="(", after=")"),))
    assert with_texts("<i><i>", media, lambda token: "<i>") == "<i><i>"
    assert with_texts("abc", media, lambda token: "") == "abc", "a tokenizer without the placeholder"


def submit_of(keep: int, side: str) -> Submit:
    text = TextParams(truncate_prompt_tokens=keep, truncation_side=side)
    return Submit((Handle(1),), (RequestId("r"),), TokenPrompt(b""), SamplingParams(), text)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", range(1, 10))
def test_a_cut_leaves_whole_images_or_refuses(side: str, keep: int) -> None:
    """Of [1, image of 3, 2, 3, image of 2, 4]."""
    first, second = item(IMAGE, IMAGE, IMAGE), item(IMAGE, IMAGE, name=b"b")
    ids, media = expanded(array("i", [1, IMAGE, 2, 3, IMAGE, 4]), Media((first, second)))
    assert len(ids) == 9
    begin = 0 if side == "right" else 9 - keep
    inside = [one for one in media.items if begin <= one.position and one.position + one.num_tokens <= begin + keep]
    apart = [one for one in media.items if one.position + one.num_tokens <= begin or one.position >= begin + keep]
    if len(inside) + len(apart) < 2:
        with pytest.raises(RequestError, match="goes through the image") as error:
            left_extras((media,), 9, keep, submit_of(keep, side))
        assert error.value.param == "truncate_prompt_tokens"
        return
    left = left_extras((media,), 9, keep, submit_of(keep, side))
    found = [(one.digest, one.position) for extra in left if isinstance(extra, Media) for one in extra.items]
    assert found == [(one.digest, one.position - begin) for one in inside]


# --- files of images ---


class SeeingBench(Bench):
    """Its requests have an image."""

    def see(self, name: str, image: bytes, retry: Retry | None = None, encoded: bool = True) -> Admit | Encode:
        media = Media((item(1, name=image),))
        ids = token_ids("hi")
        submit = Submit(
            (Handle(ord(name)),),
            (RequestId(name),),
            MediaPrompt(TokenPrompt(pack_i32(ids)), (media,)),
            SamplingParams(),
            TextParams(),
            9,
            retry=retry,
        )
        (encode,) = self.says(F0, submit)
        assert isinstance(encode, Encode)
        if not encoded:
            return encode
        _, *effects = self.event(Encoded(encode.job, array("i", ids), extras=(media,)))
        (admit,) = admits(effects)
        return admit

    def begun(self, name: str, image: bytes, retry: Retry | None = None) -> Admit:
        admit = self.see(name, image, retry)
        assert isinstance(admit, Admit)
        self.routed(admit)
        self.tokens(admit, 0, "a")
        self.news()
        return admit

    def gone(self, *images: bytes) -> list[object]:
        effects = self.says(MEDIA, MediaGone(tuple(image.ljust(32) for image in images)))
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def ends(self) -> list[tuple[int, FinishReason, ErrorKind, str]]:
        found = []
        for send in self.core.journal.batches():
            assert isinstance(send.message, TextDeltas)
            handles = array("i", send.message.handles)
            found += [(handles[end.row], end.reason, end.kind, end.message) for end in send.message.finished]
        return found

    def ticked(self, seconds: float = 1.0) -> list[HoldMedia]:
        """What the media process is told after so long."""
        self.now += seconds
        effects = self.event(Tick(self.now))
        sent = [effect.message for effect in effects if isinstance(effect, Send)]
        return [message for message in sent if isinstance(message, HoldMedia)]


def digests(*images: bytes) -> tuple[bytes, ...]:
    return tuple(image.ljust(32) for image in images)


def test_a_request_whose_image_is_gone_before_its_first_token_ends_with_an_error() -> None:
    bench = SeeingBench()
    admit = bench.see("a", b"x")
    assert isinstance(admit, Admit)
    bench.routed(admit)
    other = bench.see("b", b"y")
    assert isinstance(other, Admit)
    assert bench.gone(b"x") == [AbortRequests((RequestId("a"),))]
    assert bench.ends() == [(ord("a"), FinishReason.ERROR, ErrorKind.OVERLOADED, MEDIA_GONE)]
    assert list(bench.core.journal.by_id) == ["b"]


def test_a_request_that_has_begun_goes_on_and_ends_only_where_it_would_begin_again() -> None:
    bench = SeeingBench()
    bench.up(S0)
    admit = bench.begun("a", b"x")
    assert bench.gone(b"x") == []
    bench.tokens(admit, 1, "b")
    assert [text for _, _, _, text, _ in bench.news()] == ["b"]
    assert not [effect for effect in bench.lost(S0) if isinstance(effect, Send) and isinstance(effect.message, Admit)]
    assert bench.ends() == [(ord("a"), FinishReason.ERROR, ErrorKind.OVERLOADED, MEDIA_GONE)]
    assert not bench.core.journal.by_id


def test_a_request_that_is_still_encoded_ends_once_it_is() -> None:
    bench = SeeingBench()
    encode = bench.see("a", b"x", encoded=False)
    assert isinstance(encode, Encode)
    assert bench.gone(b"x") == []
    effects = bench.event(Encoded(encode.job, array("i", token_ids("hi"))))
    assert not [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Admit)]
    assert bench.ends() == [(ord("a"), FinishReason.ERROR, ErrorKind.OVERLOADED, MEDIA_GONE)]


def test_what_is_needed_is_asked_for_and_what_runs_without_a_client_is_held() -> None:
    bench = SeeingBench()
    admit = bench.begun("a", b"x", Retry("key", b"body", ()))
    bench.begun("b", b"y")
    assert [(message.holds, message.others) for message in bench.ticked(RENEW_S)] == [((), digests(b"x", b"y"))]
    assert not bench.ticked(), "nothing has changed"
    bench.lost(F0)
    assert list(bench.core.journal.by_id) == ["a"], "it may have its client again"
    (held,) = bench.ticked()
    assert held.holds == (Hold(Handle(admit.work.handle), digests(b"x")),)
    (told,) = bench.event(PeerUp(MEDIA, Incarnation(2)))
    assert isinstance(told, Send)
    assert isinstance(told.message, HoldMedia)
    assert (told.message.holds, told.message.others) == (held.holds, digests(b"x"))
    bench.tokens(admit, 1, "z", end=FinishReason.STOP)
    assert RequestId("a") in bench.core.journal.by_id, "it is kept for a client that comes again"
    (held,) = bench.ticked()
    assert held.holds == ()
    assert held.after == 0
    assert held.through >= admit.work.handle
    assert not bench.ticked(RENEW_S)
    assert LETTERS[0] == "a"


def test_a_client_that_comes_again_holds_its_images_itself() -> None:
    bench, retry = SeeingBench(), Retry("key", b"body", ())
    bench.begun("a", b"x", retry)
    bench.says(F0, Detach((RequestId("a"),), (Handle(ord("a")),)))
    assert [message.holds for message in bench.ticked()] != [()]
    media = Media((item(1, name=b"x"),))
    prompt = MediaPrompt(TokenPrompt(pack_i32(token_ids("hi"))), (media,))
    bench.says(
        F0, Submit((Handle(9),), (RequestId("a"),), prompt, SamplingParams(), TextParams(), 9, attempt=1, retry=retry)
    )
    assert [message.holds for message in bench.ticked()] == [()]

"Text that comes piece by piece: whole characters, nothing taken back, and at the end the text of all tokens"
import pytest
from byte_tokenizer import BOS, EOS, EOT, byte_fallback_backend, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minivllm.outputs import (
    Detokenizer, Logprob, RequestMetrics, StoppingDetokenizer, decode, find_stop, num_held_back, token_logprobs,
)

BYTES = byte_tokenizer()
FALLBACK = PreTrainedTokenizerFast(tokenizer_object=byte_fallback_backend())


class SlowTokenizer:
    "A tokenizer in pure Python: no backend; an id that it doesn't know is an error, and it tidies up if it is let"

    def __len__(self):
        return 260

    def decode(self, token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        specials = {EOS: "<eos>", EOT: "<eot>", 258: "<pad>", BOS: "<bos>"}
        parts = [b"" if i in specials and skip_special_tokens else specials[i].encode() if i in specials else bytes([i])
                 for i in token_ids]
        text = b"".join(parts).decode(errors="replace")
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


def deltas(tokenizer, token_ids, **options):
    "What each token adds to the text, and what the end adds"
    detokenizer, texts = Detokenizer(tokenizer, **options), [""]
    texts += [detokenizer.update(token_ids[: n + 1]) for n in range(len(token_ids))]
    texts.append(detokenizer.finish(token_ids))
    for before, after in zip(texts, texts[1:]):
        assert after.startswith(before), "text was taken back"
    return [after[len(before) :] for before, after in zip(texts, texts[1:])]


@pytest.mark.parametrize("tokenizer", [BYTES, SlowTokenizer()])
def test_characters_come_whole(tokenizer):
    token_ids = [97, 240, 159, 140, 182, 195, 169]
    assert deltas(tokenizer, token_ids) == ["a", "", "", "", "\U0001f336", "", "\u00e9", ""]
    assert decode(tokenizer, token_ids) == "a\U0001f336\u00e9"


def test_what_was_held_back_comes_at_the_end():
    assert deltas(BYTES, [97, 240, 159]) == ["a", "", "", "\ufffd"]
    assert deltas(BYTES, []) == [""]


def test_broken_bytes_are_given_out_once_the_text_goes_on():
    assert deltas(BYTES, [97, 0xE2, 98]) == ["a", "", "\ufffdb", ""]


def test_finish_ends_the_text():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.finish([97, 240]) == detokenizer.finish([97, 240]) == "a\ufffd"


@pytest.mark.parametrize("tokenizer", [BYTES, SlowTokenizer()])
def test_special_tokens_are_left_out_of_the_text(tokenizer):  # F38
    assert deltas(tokenizer, [72, 105, EOS]) == ["H", "i", "", ""]
    assert deltas(tokenizer, [72, EOS, 105], skip_special_tokens=False) == ["H", "<eos>", "i", ""]
    # a special token between the bytes of a character neither shows nor keeps them apart
    assert deltas(tokenizer, [195, EOT, 169]) == ["", "", "\u00e9", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, SlowTokenizer()])
def test_ids_beyond_the_tokenizer_have_no_text(tokenizer):
    "Models pad their vocabulary: such an id can be sampled, and must not end the step with an error"
    assert deltas(tokenizer, [72, 299, 105]) == ["H", "", "i", ""]


def test_nothing_is_tidied_up():
    "The final text of transformers' decode may lack spaces that a stream has already given out"
    forced = dict(clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True)  # version 5 is reluctant
    tidy = byte_tokenizer(clean_up_tokenization_spaces=True, **forced)
    assert tidy.decode(list(b"so . it")) == "so. it"
    for tokenizer in (tidy, SlowTokenizer()):
        assert "".join(deltas(tokenizer, list(b"so . it"))) == decode(tokenizer, list(b"so . it")) == "so . it"


# bytes of whole, broken and foreign characters, and special tokens in between
odd_bytes = st.sampled_from([97, 32, 10, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8C, 0xB6, 0xEF, 0xBF, 0xBD, 0xFF, EOS, BOS])


@settings(max_examples=300, deadline=None)
@given(st.lists(odd_bytes, max_size=30), st.booleans())
def test_the_text_is_that_of_all_tokens(token_ids, skip):
    joined = "".join(deltas(BYTES, token_ids, skip_special_tokens=skip))
    assert joined == decode(BYTES, token_ids, skip)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=30))
def test_a_byte_fallback_tokenizer_never_raises(token_ids):
    "Its broken bytes make it take back text that it has decoded: what was given out stays"
    assert "".join(deltas(FALLBACK, token_ids)).count("\ufffd") <= len(token_ids)


def test_byte_fallback_text_goes_on_after_broken_bytes():
    letter, broken, word = 3 + 0x41, 3 + 0xE2, 2  # <0x41>, <0xE2>, b
    assert decode(FALLBACK, [1, letter, broken, word, word]) == "a\ufffd\ufffdbb"  # A is gone
    assert deltas(FALLBACK, [1, letter, broken, word, word]) == ["a", "A", "", "\ufffdb", "b", ""]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(smollm2_folder)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_tokens_of_the_demo_model(smollm2_tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, len(smollm2_tokenizer) + 10), max_size=40))
    assert "".join(deltas(smollm2_tokenizer, token_ids)) == decode(smollm2_tokenizer, token_ids)


def test_real_text_of_the_demo_model(smollm2_tokenizer):
    text = "Na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f336\ufe0f\U0001f469\u200d\U0001f680 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 <|im_end|> x"
    pieces = deltas(smollm2_tokenizer, smollm2_tokenizer.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_times_of_a_request():
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.queue_time is metrics.time_to_first_token is metrics.time_per_output_token is metrics.latency is None
    metrics.first_scheduled_time = 11.0
    metrics.add_token(13.0)
    assert metrics.time_per_output_token is None
    metrics.add_token(14.0)
    metrics.add_token(17.0)
    metrics.finished_time = 17.5
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.latency) == (1.0, 3.0, 7.5)
    assert metrics.time_per_output_token == 2.0 and metrics.num_output_tokens == 3


def test_a_token_is_decoded_in_its_context():
    "The space in front of a word is its own, but not at the beginning: \u2581a is 'a' there and ' a' elsewhere"
    word, letter = 1, 2
    assert deltas(FALLBACK, [word, letter, word]) == ["a", "b", " a", ""] and decode(FALLBACK, [word]) == "a"


def test_the_window_stays_short():
    detokenizer, token_ids = Detokenizer(BYTES), []
    for token_id in "caf\u00e9 \u2603 ".encode() * 50:
        token_ids.append(token_id)
        detokenizer.update(token_ids)
        assert len(token_ids) - detokenizer.start <= 6  # the character before, and one that is incomplete


# Stop strings


def as_pieces(text, cuts):
    "A text cut at these places"
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    return [text[a:b] for a, b in zip(places, places[1:])]


def piece_tokenizer(pieces):
    "Its tokens are these pieces; decoding joins them"
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", *pieces]))}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend), [vocab[piece] for piece in pieces]


def stopped(pieces, **options):
    "What a user sees after each token and at the end, and the string that ended it"
    tokenizer, token_ids = piece_tokenizer(pieces)
    detokenizer, seen = StoppingDetokenizer(tokenizer, **options), [""]
    for n in range(1, len(token_ids) + 1):
        seen.append(detokenizer.update(token_ids[:n]))
        if detokenizer.stop_string is not None: break
    seen.append(detokenizer.finish(token_ids[:n]))
    assert seen[-1] == detokenizer.finish(token_ids[:n]), "finish may be called again"
    assert all(after.startswith(before) for before, after in zip(seen, seen[1:])), "text was taken back"
    return seen[1:], detokenizer.stop_string


def reference_stop(text, stop, include):
    "Letter by letter: the text ends as soon as it ends with a stop string (the longest, if there are two)"
    for n in range(1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:n].endswith(string): return text[: n if include else n - len(string)], string
    return text, None


@given(st.text("abc", min_size=1, max_size=14), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
       st.sets(st.integers(1, 13)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_text_ends_at_the_same_place_however_it_is_cut(text, stop, cuts, include):  # F35
    seen, string = stopped(as_pieces(text, cuts), stop=stop, include=include)
    assert (seen[-1], string) == reference_stop(text, stop, include)
    if string is None or include: return
    # nothing of the stop string was ever shown
    assert all(len(s) <= len(seen[-1]) for s in seen)


def test_held_back_is_what_may_become_a_stop_string_and_no_more():
    for text, held in (("ab", 0), ("abE", 1), ("abEN", 2), ("abENX", 0), ("abENTE", 4), ("E", 1), ("", 0)):
        assert num_held_back(text, ["END", "ENTER"]) == held
    assert num_held_back("abc", []) == num_held_back("aaa", ["b"]) == 0
    assert num_held_back("aa", ["aaa", "a"]) == 2  # a string that is already there is no beginning of itself


def test_the_string_that_ends_first_counts():
    assert find_stop("abENDx", ["abE", "b"]) == ("b", 1, 2)
    assert find_stop("aab", ["ab", "aab"]) == ("aab", 0, 3)  # both end here
    assert find_stop("abab", ["ab"], start=2) == ("ab", 2, 4) and find_stop("abab", ["ab"], start=4) is None


def test_a_stop_string_in_what_comes_with_the_end():
    detokenizer = StoppingDetokenizer(BYTES, stop=["\ufffd"])
    assert detokenizer.update([97]) == detokenizer.update([97, 240]) == "a" and detokenizer.stop_string is None
    assert detokenizer.finish([97, 240]) == "a" and detokenizer.stop_string == "\ufffd"


def test_logprobs_of_a_token():
    found = token_logprobs([98, 97, 98], [-2.0, -0.5, -2.0], 2, 1, BYTES)  # more than this request wants
    assert found == {98: Logprob(-2.0, 2, "b"), 97: Logprob(-0.5, 1, "a")} and list(found) == [98, 97]
    assert token_logprobs([97, 97, 98], [-0.5, -0.5, -2.0], 1, 2, BYTES) == {97: Logprob(-0.5, 1, "a"), 98: Logprob(-2.0, 2, "b")}
    assert token_logprobs([EOS, 97], [-0.5, -1.0], 1, 0) == {EOS: Logprob(-0.5, 1, None)}
    assert token_logprobs([EOS], [-0.5], 1, 0, BYTES)[EOS].decoded_token == "<eos>"

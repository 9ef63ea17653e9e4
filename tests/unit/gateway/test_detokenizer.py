"""Incremental detokenizing: pieces joined are the whole, and no piece splits a character."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.adapters.tokenizer_hf import HfTokenizer
from gateway.core.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from tests.unit.gateway.model_folder import model_folder

TOKENIZER = HfTokenizer(model_folder(), threads=1)
TOKENS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """One piece per token and the rest."""
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(ids=TOKENS)
def test_joined_pieces_are_the_whole_text(ids: list[int]) -> None:
    """Also for tokens that are no text at all, with special ones left out."""
    detokenizer = TOKENIZER.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    assert "".join(pieces_of(detokenizer, ids)) == TOKENIZER.decode(ids)


@given(ids=TOKENS)
def test_the_window_agrees(ids: list[int]) -> None:
    """The way for other vocabularies gives the same on this one."""
    window = WindowDetokenizer(TOKENIZER.decode)
    assert "".join(pieces_of(window, ids)) == TOKENIZER.decode(ids)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_characters_come_whole(text: str) -> None:
    """Valid text never shows a replacement character on the way."""
    raw = [byte_token(b) for b in text.encode()]
    for detokenizer in (TOKENIZER.detokenizer(), WindowDetokenizer(TOKENIZER.decode)):
        pieces = pieces_of(detokenizer, raw)
        assert "".join(pieces) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte() -> None:
    """Four tokens of one byte each, one character."""
    raw = [byte_token(b) for b in "🦊".encode()]
    assert pieces_of(TOKENIZER.detokenizer(), raw) == ["", "", "", "🦊", ""]


def test_an_unfinished_character_shows_at_the_end() -> None:
    """As decoding the whole would show it."""
    raw = [byte_token(b) for b in "ab🦊".encode()[:-1]]
    assert pieces_of(TOKENIZER.detokenizer(), raw)[-1] == "\ufffd"


def test_a_run_of_invalid_bytes_keeps_the_window_short() -> None:
    """Each token looks at a bounded number of tokens, whatever comes."""
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return TOKENIZER.decode(ids)

    raw = [byte_token(0x80)] * 200
    assert "".join(pieces_of(WindowDetokenizer(decode), raw)) == "\ufffd" * 200
    assert longest <= 20


def test_tokens_outside_the_table_have_no_text() -> None:
    """Models have more rows than the tokenizer has tokens."""
    assert TOKENIZER.detokenizer().push(10_000_000) == ""


def test_word_pieces_keep_their_spaces() -> None:
    """A decoder that strips the first space of a text must not strip each piece's."""
    vocab = {"▁hello": 0, "▁world": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    ids = [0, 1, 2, 1, 0]
    window = WindowDetokenizer(tokenizer.decode)
    assert "".join(pieces_of(window, ids)) == tokenizer.decode(ids) == "hello worlds world hello"
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        after = WindowDetokenizer(tokenizer.decode, prompt)
        whole = tokenizer.decode(prompt) + "".join(pieces_of(after, output))
        assert whole == tokenizer.decode(ids), "output goes on in its prompt's text"


def byte_token(byte: int) -> int:
    """The token of one byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    char = chr(byte) if byte in visible else chr(256 + hidden.index(byte))
    found = TOKENIZER._tokenizer.token_to_id(char)
    assert found is not None
    return int(found)

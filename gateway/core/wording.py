"""The words of our messages, and clients' own words within them."""


def sentence(text: str) -> str:
    """With a capital letter and a full stop, as every message for a client has them."""
    text = text.strip()
    return text and text[0].upper() + text[1:].removesuffix(".") + "."


def shown(text: str, most: int = 100) -> str:
    """`text` cut to `most` characters, in printable ASCII: control characters, half characters and
    other alphabets are escaped, so that a message can stand in any log, header or answer.
    """
    return text[:most].encode("unicode_escape").decode("ascii")

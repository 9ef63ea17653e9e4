"""Clients' own words within our messages."""


def shown(text: str, most: int = 100) -> str:
    """`text` cut to `most` characters, in printable ASCII: control characters, half characters and
    other alphabets are escaped, so that a message can stand in any log, header or answer.
    """
    return text[:most].encode("unicode_escape").decode("ascii")

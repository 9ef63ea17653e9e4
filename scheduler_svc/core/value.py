"""Values that are made in each step or for each request: frozen to the type checker only.

A frozen dataclass sets each field by a call of 0.2 us, four times what the rest of its constructor
takes, and the values of one step have 50 fields, those of one request 80. To the type checker
`value` is `dataclass`: it refuses assignments. At run time nothing does, but the values compare,
hash and print as frozen ones. Values that are made now and then are frozen dataclasses.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen, slots, kw_only):
        """A dataclass whose constructor assigns its fields."""
        assert frozen, "a value does not change"
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)


__all__ = ["value"]

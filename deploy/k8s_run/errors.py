"""How a run ends other than well."""


class RunError(Exception):
    """Something did not do what it should; the message names it and shows its last words."""


class NotPossibleError(Exception):
    """This machine cannot run pods, or cannot get what they need; nothing was said about Quire."""


class LateError(Exception):
    """The time of the whole run is over; nothing was said about Quire."""


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a group of tasks failed of: ours if there is one among them, else the group itself."""
    ours = group.subgroup((RunError, NotPossibleError, LateError))
    found: BaseException | None = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found or group

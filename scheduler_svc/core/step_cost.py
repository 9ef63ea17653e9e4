"""What a step costs on one worker: its profile, corrected by the steps that return.

A straight line, time = step_us + tokens * token_us, fitted to the last steps by least squares whose
weights fade. While all steps hold about as many tokens, the slope stays near that of the profile.
"""

from dataclasses import replace

from scheduler_svc.core.types import CostProfile

_FADE = 0.99
# Weight of the profile's slope, in squared tokens of spread among the steps seen.
_PRIOR = 4096.0
# A step that took this many times what was expected counts as no more: the process stood still.
_MAX_SURPRISE = 4.0


class StepCost:
    """Mutable; owned by the worker's state."""

    def __init__(self, profile: CostProfile) -> None:
        self._given = profile
        self._step_us = profile.step_us
        self._token_us = profile.token_us
        self._prior_us = profile.token_us
        # As known now, made when it is asked for: once a step at most.
        self._profile: CostProfile | None = profile
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def profile(self) -> CostProfile:
        """As known now."""
        if self._profile is None:
            self._profile = replace(self._given, step_us=self._step_us, token_us=self._token_us)
        return self._profile

    def expected_us(self, num_tokens: int) -> float:
        """Time of a step of so many tokens, 0 if unknown."""
        return self._step_us + num_tokens * self._token_us

    def observe(self, num_tokens: int, step_us: int) -> None:
        """A step of so many tokens took so long. Steps whose time is unknown are passed over."""
        if step_us <= 0 or num_tokens <= 0:
            return
        time_us = float(step_us)
        if self._n > 10.0:
            time_us = min(time_us, _MAX_SURPRISE * self.expected_us(num_tokens))
        self._n = self._n * _FADE + 1.0
        self._x = self._x * _FADE + num_tokens
        self._y = self._y * _FADE + time_us
        self._xx = self._xx * _FADE + num_tokens * num_tokens
        self._xy = self._xy * _FADE + num_tokens * time_us
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = max(0.0, self._xx - self._x * mean_x)
        slope = (self._xy - self._x * mean_y + _PRIOR * self._prior_us) / (spread + _PRIOR)
        slope = min(max(0.0, slope), mean_y / mean_x)
        self._step_us, self._token_us = mean_y - slope * mean_x, slope
        self._profile = None

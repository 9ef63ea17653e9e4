"""How large a plan may become: no message may exceed gRPC's 16 MiB, whatever is waiting.

The budget of a step bounds the tokens that are computed, not those that are sent: an admission with
a prefix hit or a fork brings its whole prompt and costs one token. So a plan takes no further
admission once those it has come to ADMIT_BYTES; the others wait for the next plan. The last one may
go beyond: a context has at most 2^20 tokens, in as many blocks, of five bytes each at most. With it
admissions are below 13.7 MB. What else a plan holds is below 2.2 MB, for 2^14 rows: eight steps'
growth, changes and releases, and copies of MAX_BLOCKS_MOVING blocks and one for each fork.
"""

from scheduler_svc.core.ready import Admit

ADMIT_BYTES = 3 * 2**20
# Between device and host, in operations that are not done: half of what a worker takes.
MAX_BLOCKS_MOVING = 2**15
# A 32-bit number at most.
_NUMBER = 5
# Its key, and a float.
_BIAS = _NUMBER + 4
# Ids, secrets, names and numbers of an admission.
_REST = 1024


def of_admit(admit: Admit) -> int:
    """Bytes that an admission takes at most."""
    num_numbers = len(admit.token_ids) + len(admit.block_ids) + len(admit.sampling.stop_token_ids)
    return _REST + _NUMBER * num_numbers + _BIAS * len(admit.sampling.logit_bias)

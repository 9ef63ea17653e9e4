"""What a worker may say at most.

Beyond these a message breaks the protocol or, where said, the rest of what a worker offers is left
unused. No message is larger than gRPC's 16 MiB.
"""

# Left unused: slots, device or host blocks, tokens of context beyond. The core keeps some hundred
# bytes for a block, and one request's tokens must fit into one plan.
MAX_SLOTS = 2**14
MAX_BLOCKS = 2**22
MAX_MODEL_LEN = 2**20
MAX_BLOCK_SIZE = 2**16

# Of a worker's Tokens streams, in all pieces of a snapshot together.
MAX_GATEWAYS = 4096
# In one message.
MAX_CANCELS = 2**16
MAX_OPERATIONS = 2**16
# Of a fault; the rest is cut off.
MAX_FAULT_CHARS = 500
# Epochs are Redis time in ms or a little more, and scripts count them as floating-point numbers.
MAX_EPOCH = 2**52
# Microseconds of a step or a token, 10^9 bytes per second; what lies outside is not known.
LEAST_COST, MOST_COST = 1e-6, 1e9

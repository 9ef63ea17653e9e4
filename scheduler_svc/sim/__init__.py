"""Quire under a virtual clock and one seed: a world of faults, and a cluster under load.

**The world** (`world.py`; `python -m scheduler_svc.sim --seed N`) is two schedulers, some workers
and gateways, a Redis and their clients in one thread. What runs in it is

    shipped    the scheduler's term: core, driver, inbox, outbox, lease, links, gateway watch; the
               worker's replica, executor, sessions and token hub behind its two streams; the
               gateway's engine with stream assembly, token streams and queue; all codecs
    modelled   the clock (loop.py), streams and their breaks (network.py), Redis and its scripts
               (redis_*.py), the device and its memory (device.py), processes that pause, die and
               are started anew (loop.py, places.py), clients (clients.py)

The services' own asyncio code runs under an event loop whose time jumps to the next timer. Each
process has a context by which the loop knows whose turn it is, so that one can be paused or killed
at any await. Chance comes from one seed, a stream of its own for each part, so that what one part
draws moves no other. Nothing is iterated whose order depends on addresses or on hashes of text.

Faults (faults.py) come while requests come. Then everything is healed and each request has to end
within a bounded time. Checked on the way, and an error at the event where it breaks: the core's
invariants after each event; exactly one end for each request; what a client is given is, token by
token and with its log probabilities, what its prompt and seed demand; each block a step reads holds
what the request's prefix demands; no worker obeys an older epoch after a newer one.

**The load** (`load.py`) is the core alone with workers that cost time and compute nothing, for
throughput, tails and fairness of clusters of any size, at the speed that studies need. It shares
the cost model (cost.py), and the arrivals (arrivals/), with nothing of the world.
"""
